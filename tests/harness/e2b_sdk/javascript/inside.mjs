// Inside of a sandbox: what `commands.py`, `terminals.py`, `files.py` and `git.py` show, with the packages for Node.
import assert from 'node:assert/strict'

const soon = async (ask) => {
  for (let turn = 0; turn < 1500; turn += 1) {
    const value = await ask()
    if (value) return value
    await new Promise((done) => setTimeout(done, 20))
  }
  throw new Error('this did not become true')
}
const failure = async (promise) => {
  try {
    await promise
  } catch (error) {
    return error
  }
  throw new Error('nothing was thrown')
}
const bytes = (text) => new TextEncoder().encode(text)
const text = (pieces) => Buffer.concat(pieces.map((piece) => Buffer.from(piece))).toString()

export const programs = [
  {
    name: 'foreground',
    shows: ['commands.run'],
    async run({ sdk, shared }) {
      const { stdout, stderr, exitCode } = await shared.commands.run('echo out; echo err >&2')
      assert.deepEqual([stdout, stderr, exitCode], ['out\n', 'err\n', 0])
      const error = await failure(shared.commands.run('echo o; echo e >&2; exit 7'))
      assert.ok(error instanceof sdk.CommandExitError)
      assert.deepEqual([error.exitCode, error.stdout, error.stderr], [7, 'o\n', 'e\n'])
      const where = await shared.commands.run('echo "$A $HOME $(pwd) $(id -un)"', { envs: { A: 'x y' }, cwd: '/tmp' })
      assert.equal(where.stdout, 'x y /home/user /tmp user\n')
      const out = []
      const long = await shared.commands.run("python3 -c \"print('€ü😀' * 30000, end='')\"", { onStdout: (piece) => out.push(piece) })
      assert.equal(long.stdout, '€ü😀'.repeat(30_000))
      assert.equal(out.join(''), long.stdout)
      assert.equal((await shared.commands.run('id -un', { user: 'root' })).stdout, 'root\n')
      assert.ok((await failure(shared.commands.run('sleep 764', { timeoutMs: 1_000 }))) instanceof sdk.TimeoutError)
    },
  },
  {
    name: 'background',
    shows: ['commands.list', 'commands.kill', 'commands.connect', 'CommandHandle.wait', 'CommandHandle.kill', 'CommandHandle.disconnect'],
    async run({ sdk, shared }) {
      const handle = await shared.commands.run('echo begun; sleep 797', { background: true })
      const listed = (await shared.commands.list()).find((process) => process.pid === handle.pid)
      assert.deepEqual([listed.cmd, listed.args.at(-1)], ['/bin/bash', 'echo begun; sleep 797'])
      await handle.disconnect()
      const again = await shared.commands.connect(handle.pid)
      assert.equal(await shared.commands.kill(handle.pid), true)
      assert.equal((await failure(again.wait())).exitCode, -1)
      assert.equal(await shared.commands.kill(handle.pid), false)
      const second = await shared.commands.run('sleep 798', { background: true })
      assert.equal(await second.kill(), true)
      await assert.rejects(second.wait(), sdk.CommandExitError)
      await assert.rejects(shared.commands.connect(999_999), sdk.NotFoundError)
    },
  },
  {
    name: 'stdin',
    shows: ['commands.sendStdin', 'commands.closeStdin', 'CommandHandle.sendStdin', 'CommandHandle.closeStdin'],
    isHere: ({ methods }) => 'CommandHandle.sendStdin' in methods,
    async run({ shared }) {
      const handle = await shared.commands.run('cat', { background: true, stdin: true })
      await shared.commands.sendStdin(handle.pid, 'héllo ')
      await handle.sendStdin('x'.repeat(100_000))
      await shared.commands.closeStdin(handle.pid)
      assert.equal((await handle.wait()).stdout, `héllo ${'x'.repeat(100_000)}`)
      const second = await shared.commands.run('wc -c', { background: true, stdin: true })
      await second.sendStdin('1234')
      await second.closeStdin()
      assert.equal((await second.wait()).stdout, '4\n')
    },
  },
  {
    name: 'killed sandbox',
    shows: ['commands.run'],
    isHere: ({ sdk }) => 'SandboxNotFoundError' in sdk && 'ServiceBusyError' in sdk,
    async run({ create }) {
      const sandbox = await create({ timeoutMs: 100_000 })
      const handle = await sandbox.commands.run('sleep 100', { background: true })
      const ended = failure(handle.wait())
      await sandbox.kill()
      assert.match(String(await ended), /sandbox was killed or reached its end of life/)
    },
  },
  {
    name: 'terminal',
    shows: ['pty.create', 'pty.sendInput', 'pty.resize', 'pty.kill', 'pty.connect'],
    async run({ sdk, shared }) {
      const out = []
      const handle = await shared.pty.create({ cols: 80, rows: 24, onData: (piece) => out.push(piece), envs: { MARK: 'here' }, cwd: '/tmp' })
      await shared.pty.sendInput(handle.pid, bytes('tput cols; echo $MARK-$(id -un)-$TERM-$(pwd)\n'))
      await soon(() => text(out).includes('here-user-xterm-256color-/tmp'))
      await shared.pty.resize(handle.pid, { cols: 123, rows: 30 })
      await shared.pty.sendInput(handle.pid, bytes('stty size\n'))
      await soon(() => text(out).includes('30 123'))
      const again = []
      const second = await shared.pty.connect(handle.pid, { onData: (piece) => again.push(piece) })
      await shared.pty.sendInput(handle.pid, bytes('echo both-$((40+2)); exit 4\n'))
      assert.equal((await failure(handle.wait())).exitCode, 4)
      assert.equal((await failure(second.wait())).exitCode, 4)
      assert.ok(text(out).includes('both-42') && text(again).includes('both-42'))
      const third = await shared.pty.create({ cols: 80, rows: 24, onData: () => {} })
      assert.equal(await shared.pty.kill(third.pid), true)
      await assert.rejects(third.wait(), sdk.CommandExitError)
      assert.equal(await shared.pty.kill(third.pid), false)
    },
  },
  {
    name: 'contents',
    shows: ['files.write', 'files.read', 'files.writeFiles'],
    async run({ sdk, shared: { files } }) {
      const written = await files.write('js/folder/text.txt', 'héllo')
      assert.deepEqual([written.name, written.path], ['text.txt', '/home/user/js/folder/text.txt'])
      assert.equal(await files.read('js/folder/text.txt'), 'héllo')
      const data = Uint8Array.from({ length: 3_000_000 }, (_, index) => index % 256)
      for (const options of [{}, { useOctetStream: true }, { useOctetStream: true, gzip: true }]) {
        await files.write('js/data.bin', data.buffer, options)
        assert.ok(Buffer.from(await files.read('js/data.bin', { format: 'bytes' })).equals(Buffer.from(data)))
      }
      const pieces = []
      for await (const piece of await files.read('js/data.bin', { format: 'stream' })) pieces.push(piece)
      assert.ok(Buffer.concat(pieces).equals(Buffer.from(data)))
      assert.equal((await (await files.read('js/data.bin', { format: 'blob' })).arrayBuffer()).byteLength, data.length)
      const many = await files.writeFiles([{ path: 'js/1', data: '1' }, { path: 'js/ü ö?&=#', data: '2' }])
      assert.deepEqual(many.map((item) => item.path), ['/home/user/js/1', '/home/user/js/ü ö?&=#'])
      assert.deepEqual(await files.write([]), [])
      await assert.rejects(files.read('js/no'), sdk.FileNotFoundError ?? sdk.NotFoundError)
    },
  },
  {
    name: 'descriptions',
    shows: ['files.getInfo', 'files.exists', 'files.makeDir', 'files.list', 'files.rename', 'files.remove'],
    async run({ sdk, shared: { files } }) {
      assert.deepEqual([await files.makeDir('js2/deep'), await files.makeDir('js2/deep')], [true, false])
      await files.write('js2/deep/file', '12345', { metadata: { author: 'me' } })
      const info = await files.getInfo('js2/deep/file')
      assert.deepEqual([info.name, info.type, info.size, info.permissions, info.owner], ['file', 'file', 5, '-rw-r--r--', 'user'])
      if ('metadata' in info) assert.deepEqual(info.metadata, { author: 'me' })
      assert.deepEqual((await files.list('js2', { depth: 2 })).map((item) => item.path), ['/home/user/js2/deep', '/home/user/js2/deep/file'])
      assert.equal((await files.rename('js2/deep/file', 'js2/moved')).path, '/home/user/js2/moved')
      assert.deepEqual([await files.exists('js2/moved'), await files.exists('js2/deep/file')], [true, false])
      await files.remove('js2')
      await files.remove('js2')
      assert.equal(await files.exists('js2'), false)
      await assert.rejects(files.list('js2'), sdk.FileNotFoundError ?? sdk.NotFoundError)
    },
  },
  {
    name: 'watch',
    shows: ['files.watchDir', 'WatchHandle.stop'],
    async run({ shared: { files } }) {
      await files.makeDir('js3')
      const events = []
      const handle = await files.watchDir('js3', (event) => events.push(event), { recursive: true })
      await files.write('js3/new/file', '1')
      await soon(() => events.some((event) => event.name === 'new/file'))
      assert.deepEqual([events[0].name, events[0].type], ['new', 'create'])
      await handle.stop()
    },
  },
  {
    name: 'addresses',
    shows: ['Sandbox.downloadUrl', 'Sandbox.uploadUrl'],
    async run({ shared }) {
      const headers = { 'E2b-Sandbox-Id': shared.sandboxId, 'E2b-Sandbox-Port': '49983' }
      const form = new FormData()
      form.append('file', new Blob(['signed']), 'x')
      const sent = await fetch(await shared.uploadUrl('js-signed'), { method: 'POST', body: form, headers })
      assert.equal(sent.status, 200)
      const address = await shared.downloadUrl('js-signed', { useSignatureExpiration: 100_000 })
      assert.equal(await (await fetch(address, { headers })).text(), 'signed')
      assert.equal((await fetch(address.replace('js-signed', 'other'), { headers })).status, 401)
    },
  },
  {
    name: 'git',
    shows: ['git.init', 'git.configureUser', 'git.setConfig', 'git.getConfig', 'git.add', 'git.commit', 'git.status',
      'git.branches', 'git.createBranch', 'git.checkoutBranch', 'git.deleteBranch', 'git.reset', 'git.restore',
      'git.remoteAdd', 'git.remoteGet', 'git.push', 'git.pull', 'git.clone', 'git.dangerouslyAuthenticate'],
    async run({ create }) {
      const { git, files, commands } = await create({ timeoutMs: 300_000 })
      const [path, origin] = ['/home/user/repository', '/home/user/origin.git']
      await git.init(path, { initialBranch: 'main' })
      await git.init(origin, { bare: true, initialBranch: 'main' })
      await git.configureUser('A User', 'user@acme.example')
      await git.setConfig('pull.rebase', 'false', { scope: 'local', path })
      assert.equal(await git.getConfig('pull.rebase', { scope: 'local', path }), 'false')
      await files.write(`${path}/a.txt`, '1\n')
      await git.add(path)
      assert.equal((await git.status(path)).hasStaged, true)
      await git.commit(path, 'The first')
      await git.createBranch(path, 'other')
      assert.deepEqual((await git.branches(path)).branches.sort(), ['main', 'other'])
      await git.checkoutBranch(path, 'main')
      await git.deleteBranch(path, 'other', { force: true })
      await files.write(`${path}/a.txt`, '2\n')
      await git.add(path, { files: ['a.txt'] })
      await git.reset(path, { mode: 'mixed' })
      await git.restore(path, { paths: ['a.txt'] })
      assert.equal(await files.read(`${path}/a.txt`), '1\n')
      await git.remoteAdd(path, 'origin', origin)
      assert.equal(await git.remoteGet(path, 'origin'), origin)
      await git.push(path, { remote: 'origin', branch: 'main' })
      await git.clone(origin, { path: '/home/user/clone' })
      await git.pull('/home/user/clone', { remote: 'origin', branch: 'main' })
      await git.dangerouslyAuthenticate({ username: 'me', password: 'placeholder', host: 'git.example' })
      assert.equal((await commands.run('cat ~/.git-credentials')).stdout.trim(), 'https://me:placeholder@git.example')
    },
  },
]
