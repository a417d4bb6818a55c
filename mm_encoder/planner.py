"""Row counts and tower inputs without weights or a device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from .config import ImageOptions, MediaLimits, media_limits, model_name, require_count
from .contract import ImageSize, MediaPlan, Plan
from .errors import DeviceOutOfMemoryError, ForkedProcessError
from .families.registry import load_family
from .media.header import check_pixels
from .media.source import ImageInput


class MediaPlanner:
    """Plans images for the checkpoint in a directory, from its config files alone. Thread-safe.

    `plan` and the encoder call the same function, so their row counts cannot disagree; give both the same
    `limits`. Raises CheckpointError as `Encoder` does.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        model: str | None = None,
        family: str | None = None,
        *,
        limits: MediaLimits | None = None,
    ) -> None:
        opened, self._family = load_family(checkpoint, family)
        self._limits = media_limits(limits)
        self.model = model_name(model, opened.name)
        self.family = self._family.name
        self.preprocessing_hash = self._family.preprocessing_hash
        self._prepared_in: int | None = None  # the process that has its tensors

    def plan(
        self, image: ImageInput | tuple[int, int], *, image_options: ImageOptions | None = None
    ) -> MediaPlan:
        """Return the plan of an image or of a (width, height) as shown. Of encoded bytes only the header is
        read; a path's file is read, and a data URL decoded, whole.

        Raises MediaError, for a size over `limits.max_pixels` too; TypeError or ValueError for one that is
        not two positive integers; DeviceOutOfMemoryError where the host has too little memory, OSError as the
        system gives it.
        """
        if isinstance(image, tuple):
            size = _size(image)
            check_pixels(size, self._limits, "the size")
            return self._public(self._family.plan(size))
        with _memory_faults_translated():
            return self._public(self._family.plan(self._family.size_of(image, self._limits, image_options)))

    def prepare_inputs(
        self,
        image: ImageInput,
        *,
        dtype: torch.dtype = torch.float32,
        image_options: ImageOptions | None = None,
    ) -> tuple[MediaPlan, dict[str, torch.Tensor]]:
        """Return the plan and the output of the reference's processor: `pixel_values` of `dtype` in its
        values, shape and patch order, and `grid_thws`, int64 [1, 3].

        Raises MediaError; ValueError for a dtype that is not a floating one of Torch;
        DeviceOutOfMemoryError where the host has too little memory, OSError as the system gives it;
        ForkedProcessError in a forked child of a process that has called this, unless Torch runs on one
        thread there.
        """
        if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"dtype must be a floating torch dtype, such as torch.float32, got {dtype!r}")
        self._check_process()
        with _memory_faults_translated():
            return self._prepare(image, dtype, image_options)

    def _check_process(self) -> None:
        """Raise rather than hand out tensors whose next use hangs: Torch would wait for threads of its pool
        that are in the parent. Nothing here uses that pool.
        """
        here = os.getpid()
        if self._prepared_in not in (None, here) and torch.get_num_threads() > 1:
            raise ForkedProcessError(
                "this planner prepared inputs before fork(), and the threads of Torch's pool stayed in the "
                "parent: larger operations on tensors would hang here; call torch.set_num_threads(1) in the "
                "child first, or start children by 'spawn'"
            )
        self._prepared_in = here

    def _prepare(
        self, image: ImageInput, dtype: torch.dtype, image_options: ImageOptions | None
    ) -> tuple[MediaPlan, dict[str, torch.Tensor]]:
        source = self._family.open(image, self._limits, image_options)
        plan = self._family.plan(source.size)
        with torch.inference_mode(False):  # ordinary tensors, wherever this is called from
            patches = self._family.patches(source.decode(self._limits), plan)
            return self._public(plan), {
                "pixel_values": self._family.pixel_values(patches, dtype),
                "grid_thws": torch.tensor([plan.grid_thw], dtype=torch.int64, device="cpu"),
            }

    def _public(self, plan: Plan) -> MediaPlan:
        return MediaPlan(
            model=self.model,
            family=self.family,
            preprocessing_hash=self.preprocessing_hash,
            length=plan.rows,
            embedding_offsets=plan.embedding_offsets,
            grid_thws=(plan.grid_thw,),
            original_size=(plan.source.width, plan.source.height),
        )


@contextmanager
def _memory_faults_translated() -> Iterator[None]:
    try:
        yield
    except MemoryError as error:
        raise DeviceOutOfMemoryError("not enough memory for this image; the planner goes on") from error


def _size(size: tuple[int, int]) -> ImageSize:
    if len(size) != 2:
        raise ValueError(f"a size is (width, height), got {size!r}")
    sides = zip(("width", "height"), size, strict=True)
    return ImageSize(*(require_count(name, side, 2**31 - 1) for name, side in sides))
