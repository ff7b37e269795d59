"""Templates: describe, build, name and tag them."""

from __future__ import annotations

import json
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

from e2b import BuildException, TemplateBuildStatus, wait_for_file

from .both import Both
from .rows import shows

HERE = Path(__file__).parent
IMAGES = "no image is pulled: the name of what this machine has stands for it, others need `--e2b-templates`"
REGISTRIES = "no registry is asked, so its login is refused"
COMMIT = "git -c user.name=n -c user.email=e commit -q --allow-empty -m one"
MISSING = "its template is not here"


@shows("Template.to_json", "Template.to_dockerfile", "Template.skip_cache", "Template.from_dockerfile")
async def texts(sdk: Both) -> None:
    """The SDK's own descriptions of a template."""
    template = sdk.Template().skip_cache().from_image("debian:12").run_cmd("true").set_envs({"A": "1"})
    assert json.loads(await sdk(sdk.Template.to_json(template)))["fromImage"] == "debian:12"
    assert "FROM debian:12" in sdk.Template.to_dockerfile(template)
    parsed = sdk.Template().from_dockerfile("FROM debian:12\nRUN true\n")
    assert json.loads(await sdk(sdk.Template.to_json(parsed)))["fromImage"] == "debian:12"


@shows(
    "Template.build", "Template.exists", "Template.alias_exists", "Template.from_base_image", "Template.assign_tags",
    "Template.get_tags", "Template.remove_tags",
    "TemplateBuilder.run_cmd", "TemplateBuilder.copy", "TemplateBuilder.copy_items", "TemplateBuilder.set_envs",
    "TemplateBuilder.set_workdir", "TemplateBuilder.set_user", "TemplateBuilder.make_dir",
    "TemplateBuilder.make_symlink", "TemplateBuilder.rename", "TemplateBuilder.remove", "TemplateBuilder.set_start_cmd",
    "TemplateBuilder.skip_cache",
    is_long=True,
)  # fmt: skip
async def build(sdk: Both) -> None:
    """What a template's steps did is in each of its sandboxes; its start command runs there; names and tags find it."""
    name = f"template-{time.time_ns()}"
    template = (
        sdk.Template(file_context_path=HERE)
        .from_base_image()
        .set_user("user")
        .set_workdir("/home/user/app")
        .set_envs({"BUILT": "yes"})
        .copy("rows.py", "rows.txt")
        .copy_items([{"src": "both.py", "dest": "both/"}])
        .make_dir("made/deep")
        .make_symlink("rows.txt", "link")
        .skip_cache()
        .run_cmd("echo $BUILT-$(pwd)-$(id -un) >out; touch old gone")
        .rename("old", "new")
        .remove("gone")
        .set_start_cmd("echo started >/tmp/started; sleep 999", wait_for_file("/tmp/started"))
    )
    lines: list[str] = []
    built = await sdk(sdk.Template.build(template, name, on_build_logs=lambda entry: lines.append(entry.message)))
    assert built.template_id
    assert await sdk(sdk.Template.exists(name))
    assert await sdk(sdk.Template.alias_exists(name))
    assert not await sdk(sdk.Template.exists(f"{name}-not"))
    sandbox = await sdk.create(name, timeout=100)
    shown = await sdk(
        sandbox.commands.run(
            "cd /home/user/app; cat out; head -c 20 rows.txt; ls both made new link; cat /tmp/started; test ! -e gone"
        )
    )
    for piece in ("yes-/home/user/app-user", '"""The methods', "both.py", "deep", "new", "started"):
        assert piece in shown.stdout, shown
    assert (await sdk(sandbox.commands.run("pwd"))).stdout == "/home/user/app\n"
    await sdk(sdk.Template.assign_tags(name, "stable"))
    assert "stable" in [tag.tag for tag in await sdk(sdk.Template.get_tags(name))]
    tagged = await sdk.create(f"{name}:stable", timeout=100)
    assert await sdk(tagged.files.exists("/home/user/app/out"))
    await sdk(sdk.Template.remove_tags(name, "stable"))
    assert "stable" not in [tag.tag for tag in await sdk(sdk.Template.get_tags(name))]


@shows(
    differs=dict.fromkeys(
        ("Template.from_image", "Template.from_debian_image", "Template.from_python_image", "Template.from_node_image",
         "Template.from_ubuntu_image", "Template.from_fedora_image", "Template.from_alpine_image",
         "Template.from_arch_image", "Template.from_bun_image"),
        IMAGES,
    ),
    refused=dict.fromkeys(("Template.from_aws_registry", "Template.from_gcp_registry"), REGISTRIES),
    is_long=True,
)  # fmt: skip
async def images(sdk: Both) -> None:
    """The system, Python and Node of this machine have names; any other name fails the build, with that name."""
    name, system = f"images-{time.time_ns()}", platform.freedesktop_os_release()["ID"]
    of_system = {"debian": sdk.Template().from_debian_image, "ubuntu": sdk.Template().from_ubuntu_image}
    here = [
        sdk.Template().from_image(f"{system}:latest"),
        sdk.Template().from_python_image(),
        sdk.Template().from_node_image(),
    ]
    for number, template in enumerate(here):
        assert (await sdk(sdk.Template.build(template, f"{name}-{number}"))).template_id
    away = [
        *(make for system_name, make in of_system.items() if system_name != system),
        sdk.Template().from_fedora_image,
    ]
    away += [sdk.Template().from_alpine_image, sdk.Template().from_arch_image, sdk.Template().from_bun_image]
    for make in away:
        error = await sdk.raises(BuildException, lambda make=make: sdk.Template.build(make(), name))
        assert "image" in str(error)
    of_system[system if system in of_system else "debian"]()
    for template in (
        sdk.Template().from_aws_registry("a/b:1", "id", "placeholder", "region"),
        sdk.Template().from_gcp_registry("a/b:1", {"project": "placeholder"}),
    ):
        await sdk.raises(BuildException, lambda template=template: sdk.Template.build(template, name))


@shows(
    "TemplateBuilder.pip_install", "TemplateBuilder.npm_install", "TemplateBuilder.git_clone",
    "TemplateBuilder.set_ready_cmd",
    refused={
        "TemplateBuilder.apt_install": "the system's folders are this machine's, and read-only",
        "TemplateBuilder.bun_install": "bun is not on this machine",
        "TemplateBuilder.add_mcp_server": MISSING, "TemplateBuilder.beta_dev_container_prebuild": MISSING,
        "TemplateBuilder.beta_set_dev_container_start": MISSING,
    },
    is_long=True,
)  # fmt: skip
async def installations(sdk: Both) -> None:
    """Packages that were copied in are there in each sandbox; what cannot be installed fails the build with words."""
    from tests.harness.packages import TAG, make_wheel

    name, wheel = f"installs-{time.time_ns()}", f"bits-1.0-{TAG}.whl"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / wheel).write_bytes(make_wheel("bits", "1.0", {"bits.py": "N = 42\n"}))
        (Path(folder) / "left").mkdir()
        (Path(folder) / "left" / "package.json").write_text('{"name": "left", "version": "1.0.0", "main": "index.js"}')
        (Path(folder) / "left" / "index.js").write_text("module.exports = 42\n")
        template = (
            sdk.Template(file_context_path=folder)
            .from_base_image()
            .copy(wheel, "/home/user/given/")
            .copy("left", "/home/user/given/left")
            .run_cmd(["git init -q /tmp/origin", "cd /tmp/origin", COMMIT])
            .git_clone("/tmp/origin", "/home/user/clone")
            .pip_install(f"/home/user/given/{wheel}")
            .npm_install("/home/user/given/left")
            .set_ready_cmd("test -d /home/user/clone")
        )
        await sdk(sdk.Template.build(template, name))
    sandbox = await sdk.create(name, timeout=100)
    shown = await sdk(
        sandbox.commands.run("python3 -c 'import bits; print(bits.N)'; node -p 'require(\"left\")'; ls -d clone/.git")
    )
    assert shown.stdout == "42\n42\nclone/.git\n"
    base = sdk.Template().from_base_image()
    for steps in (base.apt_install("no-such-package"), sdk.Template().from_base_image().bun_install("x")):
        await sdk.raises(BuildException, lambda steps=steps: sdk.Template.build(steps, name))
    gateway, containers = sdk.Template().from_template("mcp-gateway"), sdk.Template().from_template("devcontainer")
    prebuilt = containers.beta_dev_container_prebuild("/x")
    for steps in (gateway.add_mcp_server("exa"), prebuilt, prebuilt.beta_set_dev_container_start("/x")):
        await sdk.raises(BuildException, lambda steps=steps: sdk.Template.build(steps, name))


@shows("Template.build_in_background", "Template.get_build_status", "Template.from_template", is_long=True)
async def background(sdk: Both) -> None:
    """A build that goes on by itself; one that fails says which step."""
    name = f"background-{time.time_ns()}"
    built = await sdk(
        sdk.Template.build_in_background(sdk.Template().from_base_image().run_cmd("echo 1 >/tmp/one"), name)
    )

    async def is_ready() -> Any:
        status = await sdk(sdk.Template.get_build_status(built))
        assert status.status != TemplateBuildStatus.ERROR, status.reason
        return status.status == TemplateBuildStatus.READY

    while not await is_ready():
        await sdk.sleep(0.05)
    second = sdk.Template().from_template(name).run_cmd("cat /tmp/one; exit 3")
    error = await sdk.raises(BuildException, lambda: sdk.Template.build(second, f"{name}-second"))
    assert "exit 3" in str(error) or "3" in str(error)
