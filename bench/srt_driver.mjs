// Run Anthropic's sandbox-runtime as a library that stays loaded, turn by turn; the same orders and answers as
// peer_process.py. Usage: node srt_driver.mjs INDEX_JS PYTHON. Its proxies are started once, before the first turn.
import { spawn } from 'node:child_process'
import { createInterface } from 'node:readline'
import { pathToFileURL } from 'node:url'

const answer = (said) => process.stdout.write(JSON.stringify(said) + '\n')
const quoted = (word) => `'${word.replaceAll("'", `'\\''`)}'`
const config = {
  network: { allowedDomains: [], deniedDomains: [] },
  filesystem: { denyRead: [], allowWrite: ['.'], denyWrite: [] },
}

async function call(manager, command) {
  const wrapped = await manager.wrapWithSandbox(command)
  const output = await new Promise((resolve, reject) => {
    const child = spawn(wrapped, { shell: true, stdio: ['ignore', 'pipe', 'pipe'] })
    let stdout = ''
    let stderr = ''
    child.stdout.on('data', (data) => (stdout += data))
    child.stderr.on('data', (data) => (stderr += data))
    child.on('error', reject)
    child.on('close', () => (stdout === '1\n' ? resolve(stdout) : reject(new Error(`printed ${stdout}; ${stderr}`))))
  })
  manager.cleanupAfterCommand?.()
  return output
}

async function burst(manager, command, runs, threads, seconds) {
  const started = performance.now()
  const elapsed = () => (performance.now() - started) / 1000
  let left = runs
  let done = 0
  const work = async () => {
    while (left > 0 && elapsed() < seconds) {
      left -= 1
      await call(manager, command)
      done += 1
    }
  }
  await Promise.all(Array.from({ length: threads }, work))
  return { runs: done, seconds: elapsed() }
}

async function main(index, python) {
  const command = `${quoted(python)} -c 'print(1)'`
  const started = performance.now()
  const { SandboxManager } = await import(pathToFileURL(index).href)
  await SandboxManager.initialize(config)
  answer({ set_up_s: (performance.now() - started) / 1000 })
  for await (const line of createInterface({ input: process.stdin })) {
    const [order, ...amounts] = line.split(' ')
    try {
      if (order === 'burst') {
        answer(await burst(SandboxManager, command, ...amounts.map(Number)))
        continue
      }
      const before = performance.now()
      const output = await call(SandboxManager, command)
      answer({ ms: performance.now() - before, output })
    } catch (error) {
      answer({ error: String(error) })
    }
  }
  await SandboxManager.reset()
}

try {
  await main(...process.argv.slice(2))
  process.exit(0)
} catch (error) {
  answer({ error: String(error) })
  process.exit(1)
}
