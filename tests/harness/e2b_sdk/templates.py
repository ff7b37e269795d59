"""Templates: describe, build, name and tag them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from e2b import BuildException, TemplateBuildStatus, wait_for_file

from .both import Both
from .rows import shows

HERE = Path(__file__).parent
IMAGES = "an image's name must be one that the operator mapped (`--e2b-image`); a registry is not asked"
OTHER_REGISTRIES = "registries with a login of their own are not asked; map the image's name"


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
    assert (await sdk(sandbox.commands.run("pwd; echo $BUILT"))).stdout == "/home/user/app\nyes\n"
    await sdk(sdk.Template.assign_tags(name, "stable"))
    assert "stable" in [tag.tag for tag in await sdk(sdk.Template.get_tags(name))]
    tagged = await sdk.create(f"{name}:stable", timeout=100)
    assert await sdk(tagged.files.exists("/home/user/app/out"))
    await sdk(sdk.Template.remove_tags(name, "stable"))
    assert "stable" not in [tag.tag for tag in await sdk(sdk.Template.get_tags(name))]


@shows("Template.build_in_background", "Template.get_build_status", "Template.from_template")
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
