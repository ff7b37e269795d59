// Run the programs of a file, a few at a time, and print as JSON what each called and how it ended: node run.mjs FILE
// [WORD]. A method counts as called when it is called by a program, in any place; it then runs as it does without this.
import * as sdk from '@e2b/code-interpreter'
import * as core from 'e2b'

const AT_ONCE = 4
const { programs } = await import(`./${process.argv[2]}`)
const word = process.argv[3] ?? ''

export const create = async (...words) => {
  const sandbox = await sdk.Sandbox.create(...words)
  own.push(sandbox)
  return sandbox
}
const own = []
const first = await sdk.Sandbox.create({ timeoutMs: 600_000 })
own.push(first)

const labels = {
  Sandbox: sdk.Sandbox, commands: first.commands.constructor, files: first.files.constructor,
  pty: first.pty.constructor, git: first.git.constructor, Template: core.TemplateBase, Volume: core.Volume,
  Secret: core.Secret, SecretPaginator: core.SecretPaginator, SandboxPaginator: core.Sandbox.list().constructor,
  SnapshotPaginator: core.Sandbox.listSnapshots?.().constructor,
}
const called = {}
const owners = new Map()

const note = (owner, label) => {
  for (; owner && owner !== Function.prototype && owner !== Object.prototype; owner = Object.getPrototypeOf(owner)) {
    for (const [name, property] of Object.entries(Object.getOwnPropertyDescriptors(owner))) {
      if (name === 'constructor' || typeof property.value !== 'function' || property.value.prototype || !property.writable) continue
      const method = `${label}.${name}`
      called[method] ??= 0
      const key = `${label} ${owners.has(owner)}`
      if (property.value.isNoted) continue
      const noted = function (...words) {
        called[method] += 1
        return property.value.apply(this, words)
      }
      noted.isNoted = true
      Object.defineProperty(owner, name, { ...property, value: noted })
    }
    owners.set(owner, label)
  }
}
for (const [label, kind] of Object.entries(labels)) {
  if (!kind) continue
  note(kind, label)
  note(kind.prototype, label)
}
note(core.Template, 'Template')
const handle = await first.commands.run('true', { background: true })
note(Object.getPrototypeOf(handle), 'CommandHandle')
await first.files.makeDir('/tmp/of-the-runner')
const watching = await first.files.watchDir('/tmp/of-the-runner', () => {})
note(Object.getPrototypeOf(watching), 'WatchHandle')
await watching.stop()
await handle.wait()

const outcomes = {}
// `isHere` of a program says whether this SDK has what it shows.
const waiting = programs.filter((program) => program.name.includes(word) && (program.isHere?.({ sdk, core, methods: called }) ?? true))
const work = async () => {
  for (let program; (program = waiting.shift()); ) {
    const begin = Date.now()
    let error = ''
    try {
      await program.run({ sdk, core, create, shared: first })
    } catch (failure) {
      error = failure.stack ?? String(failure)
    }
    outcomes[program.name] = { shows: program.shows, error, seconds: (Date.now() - begin) / 1000 }
  }
}
await Promise.all(Array.from({ length: AT_ONCE }, work))
await Promise.allSettled(own.map((sandbox) => sandbox.kill()))
console.log(JSON.stringify({ outcomes, called }))
process.exit(0)
