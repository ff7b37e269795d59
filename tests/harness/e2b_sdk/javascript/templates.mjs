// Templates: what `templates.py` shows, with the packages for Node.
import assert from 'node:assert/strict'
import { writeFileSync } from 'node:fs'

const refused = async (core, template, pattern = /./) => assert.rejects(core.Template.build(template, 'js-refused'), pattern)

export const programs = [
  {
    name: 'texts',
    shows: ['Template.toJSON', 'Template.toDockerfile', 'Template.fromDockerfile', 'Template.fromImage', 'Template.setEnvs'],
    async run({ core }) {
      const template = core.Template().fromImage('debian:12').runCmd('true').setEnvs({ A: '1' })
      assert.equal(JSON.parse(await core.Template.toJSON(template)).fromImage, 'debian:12')
      assert.match(core.Template.toDockerfile(template), /FROM debian:12/)
      const parsed = core.Template().fromDockerfile('FROM debian:12\nRUN true\n')
      assert.equal(JSON.parse(await core.Template.toJSON(parsed)).fromImage, 'debian:12')
    },
  },
  {
    name: 'build',
    shows: ['Template.build', 'Template.exists', 'Template.aliasExists', 'Template.fromBaseImage', 'Template.assignTags',
      'Template.getTags', 'Template.removeTags', 'Template.runCmd', 'Template.copy', 'Template.copyItems', 'Template.setEnvs',
      'Template.setWorkdir', 'Template.setUser', 'Template.makeDir', 'Template.makeSymlink', 'Template.rename',
      'Template.remove', 'Template.setStartCmd', 'Template.skipCache'],
    async run({ core, create }) {
      const name = `js-${process.hrtime.bigint()}`
      writeFileSync('given.txt', 'given')
      const template = core
        .Template({ fileContextPath: process.cwd() })
        .fromBaseImage()
        .setUser('user')
        .setWorkdir('/home/user/app')
        .setEnvs({ BUILT: 'yes' })
        .copy('given.txt', 'one.txt')
        .copyItems([{ src: 'given.txt', dest: 'both/' }])
        .makeDir('made/deep')
        .makeSymlink('one.txt', 'link')
        .skipCache()
        .runCmd('echo $BUILT-$(pwd)-$(id -un) >out; touch old gone')
        .rename('old', 'new')
        .remove('gone')
        .setStartCmd('echo started >/tmp/started; sleep 999', core.waitForFile('/tmp/started'))
      const built = await core.Template.build(template, name)
      assert.ok(built.templateId)
      assert.ok(await core.Template.exists(name))
      assert.ok(await core.Template.aliasExists(name))
      assert.ok(!(await core.Template.exists(`${name}-not`)))
      const sandbox = await create(name, { timeoutMs: 100_000 })
      const { stdout } = await sandbox.commands.run('cat out one.txt link; ls both made new; cat /tmp/started; test ! -e gone')
      for (const piece of ['yes-/home/user/app-user', 'givengiven', 'given.txt', 'deep', 'new', 'started']) assert.ok(stdout.includes(piece), stdout)
      await core.Template.assignTags(name, 'stable')
      assert.ok((await core.Template.getTags(name)).some((tag) => tag.tag === 'stable'))
      await core.Template.removeTags(name, 'stable')
      assert.ok(!(await core.Template.getTags(name)).some((tag) => tag.tag === 'stable'))
    },
  },
  {
    name: 'background',
    shows: ['Template.buildInBackground', 'Template.getBuildStatus', 'Template.fromTemplate', 'Template.setReadyCmd', 'Template.gitClone'],
    async run({ core }) {
      const name = `js-background-${process.hrtime.bigint()}`
      const first = core.Template().fromBaseImage().runCmd('git init -q /tmp/origin && echo 1 >/tmp/one').gitClone('/tmp/origin', '/tmp/clone')
      const built = await core.Template.buildInBackground(first.setReadyCmd('true'), name)
      for (let status; status !== 'ready'; ) {
        ;({ status } = await core.Template.getBuildStatus(built))
        assert.notEqual(status, 'error')
        await new Promise((done) => setTimeout(done, 50))
      }
      await refused(core, core.Template().fromTemplate(name).runCmd('cat /tmp/one; exit 3'), /3/)
    },
  },
  {
    name: 'images',
    shows: ['Template.fromDebianImage', 'Template.fromUbuntuImage', 'Template.fromFedoraImage', 'Template.fromAlpineImage',
      'Template.fromArchImage', 'Template.fromPythonImage', 'Template.fromNodeImage', 'Template.fromBunImage',
      'Template.fromAWSRegistry', 'Template.fromGCPRegistry'],
    async run({ core }) {
      const template = () => core.Template()
      assert.ok((await core.Template.build(template().fromPythonImage(), `js-${process.hrtime.bigint()}`)).templateId)
      assert.ok((await core.Template.build(template().fromNodeImage(), `js-${process.hrtime.bigint()}`)).templateId)
      template().fromDebianImage()
      template().fromUbuntuImage()
      const away = ['fromFedoraImage', 'fromAlpineImage', 'fromArchImage', 'fromBunImage'].filter((name) => name in template())
      for (const name of away)
        await refused(core, template()[name](), /image/)
      await refused(core, template().fromAWSRegistry('a/b:1', { accessKeyId: 'id', secretAccessKey: 'placeholder', region: 'x' }))
      await refused(core, template().fromGCPRegistry('a/b:1', { serviceAccountJSON: { project: 'placeholder' } }))
    },
  },
  {
    name: 'installations',
    shows: ['Template.pipInstall', 'Template.npmInstall', 'Template.aptInstall', 'Template.bunInstall', 'Template.addMcpServer',
      'Template.betaDevContainerPrebuild', 'Template.betaSetDevContainerStart'],
    async run({ core }) {
      const base = () => core.Template().fromBaseImage()
      for (const steps of [base().pipInstall('/no/such/wheel.whl'), base().npmInstall('/no/such/folder'), base().aptInstall('no-such-package'), base().bunInstall('x')])
        await refused(core, steps)
      await refused(core, core.Template().fromTemplate('mcp-gateway').addMcpServer('exa'))
      const prebuilt = core.Template().fromTemplate('devcontainer').betaDevContainerPrebuild('/x')
      await refused(core, prebuilt)
      await refused(core, prebuilt.betaSetDevContainerStart('/x'))
    },
  },
]
