// Sandboxes and their code: what `sandboxes.py`, `code.py` and `stores.py` show, with the packages for Node.
import assert from 'node:assert/strict'

const soon = async (ask) => {
  for (let turn = 0; turn < 1500; turn += 1) {
    const value = await ask()
    if (value) return value
    await new Promise((done) => setTimeout(done, 20))
  }
  throw new Error('this did not become true')
}
const pages = async (paginator) => {
  const items = []
  while (paginator.hasNext) items.push(...(await paginator.nextItems()))
  return items
}
const secondsLeft = async (sandbox) => ((await sandbox.getInfo()).endAt - Date.now()) / 1000

export const programs = [
  {
    name: 'life',
    shows: ['Sandbox.create', 'Sandbox.getInfo', 'Sandbox.kill', 'Sandbox.isRunning', 'Sandbox.getFullInfo'],
    async run({ sdk, create }) {
      const sandbox = await create({ timeoutMs: 100_000, metadata: { user: 'a b', ö: '1=2&3' }, envs: { GREETING: 'héllo' } })
      const info = await sandbox.getInfo()
      assert.deepEqual(info.metadata, { user: 'a b', ö: '1=2&3' })
      assert.deepEqual([info.sandboxId, info.state], [sandbox.sandboxId, 'running'])
      assert.ok(Math.abs(info.endAt - info.startedAt - 100_000) < 10_000)
      assert.equal((await sdk.Sandbox.getFullInfo(sandbox.sandboxId)).sandboxId, sandbox.sandboxId)
      assert.equal((await sandbox.commands.run('echo $GREETING')).stdout, 'héllo\n')
      assert.equal(await sandbox.isRunning(), true)
      assert.notEqual(await sandbox.kill(), false)
      assert.equal(await sandbox.isRunning(), false)
      assert.equal(await sdk.Sandbox.kill(sandbox.sandboxId), false)
      await assert.rejects(sdk.Sandbox.getInfo(sandbox.sandboxId), sdk.SandboxNotFoundError ?? sdk.NotFoundError)
      await assert.rejects(sandbox.commands.run('true'))
    },
  },
  {
    name: 'connect',
    shows: ['Sandbox.connect', 'Sandbox.setTimeout'],
    async run({ sdk, create }) {
      const sandbox = await create({ timeoutMs: 300_000 })
      const again = await sdk.Sandbox.connect(sandbox.sandboxId, { timeoutMs: 10_000 })
      assert.ok((await secondsLeft(again)) > 200)
      await sandbox.connect({ timeoutMs: 600_000 })
      assert.ok((await secondsLeft(again)) > 500)
      await again.setTimeout(20_000)
      assert.ok((await secondsLeft(sandbox)) < 25)
      await sdk.Sandbox.setTimeout(sandbox.sandboxId, 1_000)
      await soon(async () => !(await sandbox.isRunning()))
      await assert.rejects(sandbox.setTimeout(1_000), sdk.NotFoundError)
      await assert.rejects(sdk.Sandbox.connect('nosuchsandbox'), sdk.NotFoundError)
    },
  },
  {
    name: 'listing',
    shows: ['Sandbox.list', 'SandboxPaginator.nextItems'],
    async run({ sdk, create }) {
      const mark = { mark: `a&b=c ${process.hrtime.bigint()}` }
      const ids = []
      for (const n of ['0', '1', '2']) ids.unshift((await create({ metadata: { ...mark, n }, timeoutMs: 100_000 })).sandboxId)
      const listed = async (options) => (await pages(sdk.Sandbox.list(options))).map((info) => info.sandboxId)
      assert.deepEqual(await listed({ query: { metadata: mark } }), ids)
      assert.deepEqual(await listed({ query: { metadata: mark }, limit: 1 }), ids)
      assert.deepEqual(await listed({ query: { metadata: { ...mark, n: '1' } } }), [ids[1]])
      assert.deepEqual(await listed({ query: { metadata: { ...mark, n: '9' } } }), [])
      assert.deepEqual(await listed({ query: { metadata: mark, state: ['paused'] } }), [])
    },
  },
  {
    name: 'pause',
    shows: ['Sandbox.pause', 'Sandbox.betaPause'],
    async run({ sdk, create }) {
      const sandbox = await create({ timeoutMs: 300_000 })
      const handle = await sandbox.commands.run('sleep 999', { background: true, timeoutMs: 0 })
      await sandbox.files.write('kept', '1')
      assert.equal(await sandbox.pause(), true)
      assert.equal(await sandbox.pause(), false)
      assert.equal((await sandbox.getInfo()).state, 'paused')
      const again = await sandbox.connect({ timeoutMs: 100_000 })
      assert.equal(await again.files.read('kept'), '1')
      assert.ok((await again.commands.list()).some((process) => process.pid === handle.pid))
      assert.equal(await again.commands.kill(handle.pid), true)
      await assert.rejects(handle.wait())
      assert.equal(await sdk.Sandbox.betaPause(sandbox.sandboxId), true)
    },
  },
  {
    name: 'snapshots',
    shows: ['Sandbox.createSnapshot', 'Sandbox.listSnapshots', 'Sandbox.deleteSnapshot', 'SnapshotPaginator.nextItems', 'Sandbox.fork'],
    async run({ sdk, create }) {
      const sandbox = await create({ timeoutMs: 300_000 })
      await sandbox.files.write('kept', '1')
      const { snapshotId } = await sandbox.createSnapshot()
      assert.deepEqual((await pages(sandbox.listSnapshots())).map((item) => item.snapshotId), [snapshotId])
      const other = await create(snapshotId, { timeoutMs: 100_000 })
      assert.equal(await other.files.read('kept'), '1')
      assert.equal(await sdk.Sandbox.deleteSnapshot(snapshotId), true)
      assert.equal(await sdk.Sandbox.deleteSnapshot(snapshotId), false)
      const forks = (await sandbox.fork?.({ count: 2 })) ?? []
      assert.equal(forks.length, sandbox.fork ? 2 : 0)
      for (const fork of forks) {
        assert.equal(await fork.files.read('kept'), '1')
        await fork.kill()
      }
    },
  },
  {
    name: 'description',
    shows: ['Sandbox.getMetrics', 'Sandbox.getHost', 'Sandbox.getMcpUrl', 'Sandbox.getMcpToken', 'Sandbox.updateNetwork'],
    async run({ sdk, create, shared }) {
      const rows = await soon(async () => { const found = await shared.getMetrics(); return found.length ? found : null })
      assert.ok(rows.every((row) => row.cpuCount >= 1 && row.memTotal >= row.memUsed && row.diskTotal >= row.diskUsed))
      assert.ok(shared.getHost(3000).startsWith(`3000-${shared.sandboxId}.`))
      assert.ok(shared.getMcpUrl().endsWith('/mcp'))
      await assert.rejects(shared.getMcpToken(), sdk.NotFoundError)
      await assert.rejects(sdk.Sandbox.create({ mcp: { browserbase: { apiKey: 'x' } } }), /mcp/i)
      const sandbox = await create({ timeoutMs: 100_000, network: { allowOut: ['acme.example'], denyOut: ['0.0.0.0/0'] } })
      await sandbox.updateNetwork({ allowOut: ['example.com'], denyOut: ['0.0.0.0/0'] })
      assert.deepEqual((await sandbox.getInfo()).network.allowOut, ['example.com'])
    },
  },
  {
    name: 'code',
    shows: ['Sandbox.runCode', 'Sandbox.createCodeContext', 'Sandbox.listCodeContexts', 'Sandbox.removeCodeContext', 'Sandbox.restartCodeContext'],
    isHere: ({ sdk }) => 'getJupyterRequestUrl' in sdk.Sandbox.prototype, // others know host names alone
    async run({ sdk, shared }) {
      await shared.runCode('number = 20')
      assert.equal((await shared.runCode('number += 1\nnumber * 2')).text, '42')
      const out = []
      const execution = await shared.runCode("import sys\nprint('ö€')\nprint('e', file=sys.stderr)\n'text'", {
        onStdout: (message) => out.push(message.line), onStderr: (message) => out.push(message.line),
      })
      assert.deepEqual([execution.logs.stdout.join(''), execution.logs.stderr.join(''), execution.text], ['ö€\n', 'e\n', 'text'])
      assert.deepEqual(out.sort(), ['e\n', 'ö€\n'])
      const failed = await shared.runCode('1/0')
      assert.deepEqual([failed.error.name, failed.error.value], ['ZeroDivisionError', 'division by zero'])
      assert.equal((await shared.runCode("import os; os.environ.get('ONE')", { envs: { ONE: '1' } })).text, '1')
      for (const [language, code] of [['javascript', 'console.log(6 * 7)'], ['typescript', 'const x: number = 42; console.log(x)'], ['bash', 'echo 42']])
        assert.equal((await shared.runCode(code, { language })).logs.stdout.join(''), '42\n', language)
      const context = await shared.createCodeContext({ language: 'python', cwd: '/tmp' })
      await shared.runCode('mine = 1', { context })
      assert.equal((await shared.runCode('import os; (mine, os.getcwd())', { context })).text, "(1, '/tmp')")
      assert.ok((await shared.listCodeContexts()).some((item) => item.id === context.id))
      await shared.restartCodeContext(context)
      assert.equal((await shared.runCode('mine', { context })).error.name, 'NameError')
      await shared.removeCodeContext(context)
      await assert.rejects(shared.runCode('1', { context }), sdk.NotFoundError)
      await assert.rejects(shared.runCode('import time; time.sleep(500)', { timeoutMs: 1_000 }), sdk.TimeoutError)
      assert.equal((await shared.runCode('number')).text, '21')
    },
  },
  {
    name: 'volumes',
    shows: ['Volume.create', 'Volume.connect', 'Volume.getInfo', 'Volume.list', 'Volume.destroy', 'Volume.writeFile',
      'Volume.readFile', 'Volume.makeDir', 'Volume.exists', 'Volume.remove', 'Volume.updateMetadata'],
    async run({ core, create }) {
      const { Volume } = core
      const volume = new Volume('volume', 'volume', 'token')
      for (const ask of [
        () => Volume.create('volume'), () => Volume.list(), () => Volume.getInfo('volume'), () => Volume.connect('volume'),
        () => Volume.destroy('volume'), () => volume.makeDir('/a'), () => volume.writeFile('/a', 'x'),
        () => volume.readFile('/a'), () => volume.list('/'), () => volume.exists('/a'), () => volume.getInfo('/a'),
        () => volume.updateMetadata('/a', { mode: 0o600 }), () => volume.remove('/a'),
      ]) await assert.rejects(ask)
      await assert.rejects(create({ timeoutMs: 100_000, volumeMounts: { '/mnt': volume } }), /no volumes/)
    },
  },
  {
    name: 'secrets',
    shows: ['Secret.create', 'Secret.update', 'Secret.getInfo', 'Secret.list', 'Secret.exists', 'Secret.destroy',
      'SecretPaginator.nextItems', 'Secret.fill', 'Secret.iamToken'],
    isHere: ({ core }) => 'Secret' in core,
    async run({ core, sdk }) {
      const name = `js-${process.hrtime.bigint()}`
      const made = await core.Secret.create(name, 'placeholder-one', { metadata: { for: 'tests' } })
      assert.deepEqual([made.name, made.version], [name, 1])
      assert.equal((await core.Secret.update(name, 'placeholder-two')).version, 2)
      assert.ok(!JSON.stringify(await core.Secret.getInfo(name)).includes('placeholder'))
      assert.ok((await pages(core.Secret.list())).some((item) => item.name === name))
      assert.equal(await core.Secret.exists(name), true)
      assert.equal(await core.Secret.destroy(name), true)
      assert.equal(await core.Secret.destroy(name), false)
      assert.equal(core.Secret.fill('name'), '${e2b.secrets.name}')
      const one = core.Secret.iamToken({ audience: 'aud', tokenType: 'JWT-SVID' })
      await assert.rejects(sdk.Sandbox.create({ iam: { tokens: { one } } }), /iam/i)
    },
  },
]
