"""Compiled towers: their rows, what is checked before them, and what they leave to the interpreter."""

from __future__ import annotations

import gc
import json
import random
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from mm_encoder import CacheConfig, Encoder, RuntimeMismatchError
from mm_encoder.coalescer import Coalescer
from mm_encoder.compiled.container import Container, Library
from mm_encoder.compiled.packages import Package, Packages
from mm_encoder.compiled.signature import SPECIAL, Signature
from mm_encoder.compiled.tower import CompiledTower
from mm_encoder.families.glm53 import GlmTower
from mm_encoder.families.layers import Grid
from mm_encoder.families.registry import load_family

from ..conftest import GOLDEN
from ..helpers.waiting import HANG

pytestmark = pytest.mark.needs_native
CPU = torch.device("cpu")
FAMILIES = ["glm53", "kimi_k3", "deepseek41"]
Built = dict[tuple[str, torch.dtype], Package]


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(params=FAMILIES)
def tower(request: pytest.FixtureRequest, built: Built) -> CompiledTower:
    return compiled(str(request.param), built)


@pytest.fixture
def glm(built: Built) -> CompiledTower:
    return compiled("glm53", built)


def compiled(family: str, built: Built, dtype: torch.dtype = torch.float32) -> CompiledTower:
    eager = load_family(GOLDEN / family / "checkpoint")[1].build_tower(CPU, dtype)
    return CompiledTower(eager, Library(built[family, dtype].library))


def patches_of(tower: CompiledTower, grids: list[Grid], seed: int = 0) -> torch.Tensor:
    tokens = sum(t * h * w for t, h, w in grids)
    generator = torch.Generator().manual_seed(seed)
    width = Signature(tower.eager).bytes
    return torch.randint(256, (tokens, width), dtype=torch.uint8, generator=generator)


def sized(tower: CompiledTower, *sides: tuple[int, int]) -> list[Grid]:
    return [(1, h * tower.eager.merge, w * tower.eager.merge) for h, w in sides]


# --- rows --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_rows_are_the_references(family: str, packages: Packages) -> None:
    wanted = load_file(GOLDEN / family / "expected.safetensors")
    paths = sorted((GOLDEN / family / "images").iterdir())
    with Encoder(GOLDEN / family / "checkpoint", device="cpu", tower="compiled") as encoder:
        assert encoder.health().tower == "compiled"
        results = encoder.generate([path.read_bytes() for path in paths])
    for path, (rows, _) in zip(paths, results, strict=True):
        reference = wanted[f"{path.stem}.embedding"]
        assert rows.dtype == torch.float32
        assert rows.shape == reference.shape
        assert (rows - reference).abs().max().item() <= 2e-5, path.name


def test_bfloat16_rows_are_as_near_to_float32_as_the_references_own(packages: Packages) -> None:
    wanted = load_file(GOLDEN / "glm53" / "expected.safetensors")
    paths = sorted((GOLDEN / "glm53" / "images").iterdir())
    with Encoder(GOLDEN / "glm53" / "checkpoint", device="cpu", dtype=torch.bfloat16) as encoder:
        assert encoder.health().tower == "compiled"  # "auto" takes what there is
        results = encoder.generate(paths)
    for path, (rows, _) in zip(paths, results, strict=True):
        exact = wanted[f"{path.stem}.embedding"]
        theirs = wanted[f"{path.stem}.embedding_bf16"].float()
        assert rows.dtype == torch.bfloat16
        assert (rows.float() - exact).norm() <= (theirs - exact).norm(), path.name


@pytest.mark.parametrize("sides", [(1, 1), (1, 2), (2, 1), (3, 5), (1, 64), (31, 2), (30, 41)])
def test_grids_of_any_size_give_the_python_towers_rows(tower: CompiledTower, sides: tuple[int, int]) -> None:
    grids = sized(tower, sides)
    patches = patches_of(tower, grids)
    rows, eager = tower(patches, grids), tower.eager(patches, grids)
    assert (rows - eager).abs().max().item() <= 2e-5
    assert not rows.requires_grad


def test_sixteen_thousand_patches(glm: CompiledTower) -> None:
    grids: list[Grid] = [(16, 32, 32)]  # in frames, as attention over all of them would take half a minute
    patches = patches_of(glm, grids)
    assert (glm(patches, grids) - glm.eager(patches, grids)).abs().max().item() <= 2e-5


def test_packed_images_give_the_rows_that_each_gives_alone(tower: CompiledTower) -> None:
    chance = random.Random(3)
    for turn in range(70):
        sides = [(chance.randint(1, 6), chance.randint(1, 6)) for _ in range(chance.randint(2, 5))]
        grids = sized(tower, *sides)
        parts = [patches_of(tower, [grid], turn + index) for index, grid in enumerate(grids)]
        alone = [tower(part, [grid]) for part, grid in zip(parts, grids, strict=True)]
        wanted = torch.cat(alone)
        difference = (tower(torch.cat(parts), grids) - wanted).norm() / wanted.norm()
        assert difference.item() <= 1e-6, grids


def test_frames_of_a_clip_do_not_see_each_other(glm: CompiledTower) -> None:
    grids: list[Grid] = [(3, 4, 6)]
    patches = patches_of(glm, grids)
    assert (glm(patches, grids) - glm.eager(patches, grids)).abs().max().item() <= 2e-5


@pytest.mark.threads
def test_replicas_share_a_package_and_give_the_same_bits(packages: Packages) -> None:
    images = sorted((GOLDEN / "glm53" / "images").iterdir())
    with Encoder(GOLDEN / "glm53" / "checkpoint", device="cpu", tower="compiled") as alone:
        wanted = [rows for rows, _ in alone.generate(images)]
    for share in (False, True):
        with (
            Encoder(
                GOLDEN / "glm53" / "checkpoint",
                device="cpu",
                tower="compiled",
                replicas_per_gpu=4,
                share_weights=share,
            ) as encoder,
            ThreadPoolExecutor(8) as pool,
        ):
            for got in pool.map(lambda _: encoder.generate(images), range(16)):
                assert all(torch.equal(a.tensor, b) for a, b in zip(got, wanted, strict=True))


def test_states_of_the_host_change_neither_bits_nor_dtype(glm: CompiledTower) -> None:
    grids = sized(glm, (3, 5))
    patches = patches_of(glm, grids)
    wanted = glm(patches, grids)
    for state in (
        torch.enable_grad(),
        torch.inference_mode(),
        torch.autocast("cpu", torch.bfloat16),
        torch.device("meta"),
    ):
        with state:
            rows = glm(patches, grids)
        assert rows.dtype == torch.float32
        assert not rows.requires_grad
        assert torch.equal(rows, wanted)


# --- what is left to the interpreter -----------------------------------------------------------------


class CountOperators(TorchDispatchMode):
    """Counts operators, but not those that the native call dispatches."""

    count = 0
    native = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not self.native
        return function(*args, **(kwargs or {}))


def test_python_dispatches_few_operators_an_image(
    tower: CompiledTower, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Container.run

    def in_native_code(container: Container, inputs: list[torch.Tensor]) -> torch.Tensor:
        CountOperators.native = True
        try:
            return run(container, inputs)
        finally:
            CountOperators.native = False

    monkeypatch.setattr(Container, "run", in_native_code)
    grids = sized(tower, (7, 9))
    patches = patches_of(tower, grids)
    with CountOperators() as first:
        tower(patches, grids)
    with CountOperators() as again:
        tower(patches, grids)
    with CountOperators() as eager:
        tower.eager(patches, grids)
    assert again.count < first.count <= 30
    assert again.count <= 10
    assert eager.count > 50  # so that the count counts


def test_the_hosts_process_never_imports_a_compiler(packages: Packages) -> None:
    image = str(next((GOLDEN / "glm53" / "images").iterdir()))
    checkpoint = str(GOLDEN / "glm53" / "checkpoint")
    program = (
        "import sys, torch\n"
        "from mm_encoder import Encoder\n"
        "before = set(sys.modules)\n"
        f"with Encoder({checkpoint!r}, device='cpu', tower='compiled') as encoder:\n"
        f"    encoder.generate([open({image!r}, 'rb').read()])\n"
        "    assert encoder.health().tower == 'compiled'\n"
        "new = {'.'.join(name.split('.')[:2]) for name in set(sys.modules) - before}\n"
        "bad = {'torch._inductor', 'torch._dynamo', 'torch.export', 'sympy', 'triton'} & new\n"
        "assert not bad, bad\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG)
    assert run.returncode == 0, run.stderr


def test_closing_frees_weights_and_containers(built: Built) -> None:
    made = compiled("glm53", built)
    grids = sized(made, (2, 2))
    in_a_thread = threading.Thread(target=made, args=(patches_of(made, grids), grids))
    in_a_thread.start()
    in_a_thread.join()
    del in_a_thread
    made(patches_of(made, grids), grids)
    weights = [weakref.ref(value) for value in made.eager.parameters()]
    storage = weakref.ref(made.eager.trunk.embed.weight.untyped_storage())
    container = weakref.ref(made._here.container)
    del made
    gc.collect()
    assert container() is None
    assert not [weight for weight in weights if weight() is not None]
    assert storage() is None


def test_weights_are_the_callers_tensors(glm: CompiledTower) -> None:
    grids = sized(glm, (2, 3))
    patches = patches_of(glm, grids)
    before = glm(patches, grids)
    glm.eager.trunk.norm.weight.add_(1.0)  # type: ignore[operator]
    assert not torch.equal(glm(patches, grids), before)
    assert (glm(patches, grids) - glm.eager(patches, grids)).abs().max().item() <= 2e-5


# --- what is checked before a call -------------------------------------------------------------------


def wrong_calls(arguments: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield every kind of wrong call: nothing in a package would notice it."""

    def with_one(index: int, value: torch.Tensor) -> list[torch.Tensor]:
        return [*arguments[:index], value, *arguments[index + 1 :]]

    yield arguments[:-1]
    yield [*arguments, arguments[-1]]
    yield []
    for index, right in enumerate(arguments):
        others = [d for d in (torch.float64, torch.int32, torch.uint8, torch.bfloat16) if d != right.dtype]
        changes: list[Callable[[torch.Tensor], torch.Tensor]] = [
            *(lambda x, d=dtype: x.to(d) for dtype in others),
            lambda x: x[:0],
            lambda x: x.unsqueeze(-1),
            lambda x: x.unsqueeze(0),
            lambda x: x.to("meta"),
            lambda x: torch.stack((x, x), -1)[..., 0],  # strides
            lambda x: x.to_sparse() if x.is_floating_point() else x.to("meta"),
        ]
        if right.ndim > 1:
            changes += [lambda x: x[..., :-1].contiguous(), lambda x: torch.cat((x, x), -1)]
        if index in (0, 2, 3):  # tokens
            changes += [lambda x: x[:-1].contiguous(), lambda x: torch.cat((x, x))]
        for change in changes:
            yield with_one(index, change(right))


def test_no_wrong_call_reaches_the_package(tower: CompiledTower) -> None:
    grids = sized(tower, (3, 4), (2, 2))
    signature = Signature(tower.eager)
    patches = patches_of(tower, grids)
    tables = tower.eager.tables(grids, len(patches))
    arguments = signature.arguments(patches, tables)
    tokens = sum(tables.lengths)
    signature.check(arguments, tokens)
    tried = 0
    for wrong in wrong_calls(arguments):
        with pytest.raises(ValueError, match="must be|takes"):
            signature.check(wrong, tokens)
        tried += 1
    for index, (name, _, _, _) in enumerate(signature.inputs):
        if name not in SPECIAL:
            continue
        for value in (1 << 40, tokens, -SPECIAL[name] - 1):
            moved = arguments[index].clone()
            moved.view(-1)[0] = value
            with pytest.raises(ValueError, match=f"{name} must be from"):
                signature.check([*arguments[:index], moved, *arguments[index + 1 :]], tokens)
            tried += 1
    assert tried > 50
    for count in (0, -1, tokens + 1):
        with pytest.raises(ValueError, match="must be"):
            signature.check(arguments, count)


@pytest.mark.parametrize("lengths", [(0,), (4, 0, 8), (), (-4, 16)])
def test_empty_segments_never_reach_the_package(glm: CompiledTower, lengths: tuple[int, ...]) -> None:
    grids = sized(glm, (1, 3))
    patches = patches_of(glm, grids)
    tables = glm.eager.tables(grids, len(patches))._replace(lengths=lengths)
    with pytest.raises(ValueError, match="must"):
        Signature(glm.eager).arguments(patches, tables)


@pytest.mark.parametrize("grids", [[], [(1, 3, 2)], [(1, 2, 2), (1, 2, 2)], [(0, 2, 2)]])
def test_grids_that_do_not_fit_are_refused(glm: CompiledTower, grids: list[Grid]) -> None:
    with pytest.raises(ValueError, match=r"grid"):
        glm(patches_of(glm, [(1, 2, 2)]), grids)


def test_weights_of_another_dtype_or_size_are_refused(built: Built) -> None:
    library = Library(built["glm53", torch.float32].library)
    eager = load_family(GOLDEN / "glm53" / "checkpoint")[1].build_tower(CPU, torch.float32)
    right = {**dict(eager.named_parameters()), **dict(eager.named_buffers())}
    Container(library, right)
    name = "trunk.embed.weight"
    for wrong in (right[name].half(), right[name][:-1], right[name].to(torch.int64)):
        with pytest.raises(RuntimeMismatchError, match=name):
            Container(library, {**right, name: wrong})
    with pytest.raises(RuntimeMismatchError, match=name):
        Container(library, {key: value for key, value in right.items() if key != name})


def test_strides_of_weights_do_not_matter(built: Built) -> None:
    made = compiled("glm53", built)
    grids = sized(made, (2, 3))
    patches = patches_of(made, grids)
    wanted = made(patches, grids)
    weight = made.eager.trunk.blocks[0].attn.qkv.weight
    weight.data = weight.data.t().contiguous().t()
    assert not weight.is_contiguous()
    again = CompiledTower(made.eager, Library(built["glm53", torch.float32].library))
    assert torch.equal(again(patches, grids), wanted)


def test_a_failing_native_call_gives_torchs_message(built: Built) -> None:
    made = compiled("glm53", built)
    with pytest.raises(RuntimeError, match="Cannot find constants"):
        made._here.container._library.call(
            "UpdateUserManagedConstantBufferPairs",
            made._here.container._parts.container,
            None,
            0,
            False,
            True,
        )


# --- the self-check ----------------------------------------------------------------------------------


@pytest.fixture
def another_tower(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python tower computes something else than what was compiled."""
    forward = GlmTower.forward
    monkeypatch.setattr(GlmTower, "forward", lambda *arguments: forward(*arguments) * 1.01)


@pytest.mark.usefixtures("another_tower", "packages")
def test_a_package_that_differs_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = GOLDEN / "glm53" / "checkpoint"
    with pytest.raises(RuntimeMismatchError, match="differs"):
        Encoder(checkpoint, device="cpu", tower="compiled")
    with Encoder(checkpoint, device="cpu", replicas_per_gpu=2, cache=CacheConfig()) as encoder:
        assert encoder.health().tower.startswith("Python (the compiled tower differs")
    assert [r for r in caplog.records if getattr(r, "mm_event", "") == "tower_refused"]


@pytest.mark.usefixtures("packages")
def test_the_cache_key_tells_the_towers_apart(built: Built) -> None:
    checkpoint = GOLDEN / "glm53" / "checkpoint"
    kinds = []
    for mode in ("eager", "compiled"):
        with Encoder(checkpoint, device="cpu", tower=mode, cache=CacheConfig()) as encoder:
            assert isinstance(encoder._coalescer, Coalescer)
            kinds.append(encoder._coalescer.keys.identity["tower"])
    assert kinds == ["eager", f"compiled {built['glm53', torch.float32].digest}"]


def test_the_manifest_has_no_paths_of_this_machine(packages: Packages) -> None:
    for manifest in packages.directory.glob("*.json"):
        assert not [v for v in json.loads(manifest.read_text())["identity"].values() if "/" in v]
