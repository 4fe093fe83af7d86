"""Rigid motions, and the quaternions that parametrise their rotations.

A `Rigid` maps local coordinates to global ones: x -> R x + t. All functions broadcast over leading axes and keep the
dtype of their inputs. Products of 3x3 matrices are sums of elementwise products instead of matmul, because they are
small, and a device may round a float32 matmul to TF32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Quaternions are w x y z. Component k of the Hamilton product a b is the sum of PRODUCT[k, i, j] a_i b_j. Entry [x, y]
# of the rotation of q, v -> q v q*, is the sum of ROTATION[x, y, i, j] q_i q_j.
PRODUCT = np.zeros((4, 4, 4))
for _k, _row in enumerate(("+00 -11 -22 -33", "+01 +10 +23 -32", "+02 -13 +20 +31", "+03 +12 -21 +30")):
    for _term in _row.split():
        PRODUCT[_k, int(_term[1]), int(_term[2])] = float(f"{_term[0]}1")
ROTATION = np.einsum("xmj,j,miy->xyij", PRODUCT[1:], np.array([1.0, -1, -1, -1]), PRODUCT[:, :, 1:])


@dataclass(frozen=True)
class Rigid:
    """A collection of motions x -> R x + t, of shape `*`: rotations [*, 3, 3] and translations [*, 3].

    Indexing, as in `rigid[..., None]`, acts on the axes `*`.
    """

    rotation: Tensor
    translation: Tensor

    @property
    def shape(self) -> torch.Size:
        """The shape `*` of the collection."""
        return self.translation.shape[:-1]

    def __getitem__(self, index: Any) -> Rigid:
        index = index if isinstance(index, tuple) else (index,)
        if not any(i is Ellipsis for i in index):
            return Rigid(self.rotation[index], self.translation[index])
        whole = slice(None)
        return Rigid(self.rotation[(*index, whole, whole)], self.translation[(*index, whole)])

    def apply(self, points: Tensor) -> Tensor:
        """Map local points [*, 3] to global points [*, 3]."""
        return rotate(self.rotation, points) + self.translation

    def invert_apply(self, points: Tensor) -> Tensor:
        """Map global points [*, 3] to local points [*, 3]."""
        return rotate(self.rotation.mT, points - self.translation)

    def compose(self, other: Rigid) -> Rigid:
        """Return the motion that applies `other` first, then `self`."""
        return Rigid(multiply(self.rotation, other.rotation), self.apply(other.translation))

    def invert(self) -> Rigid:
        """Return the inverse motion."""
        return Rigid(self.rotation.mT, -rotate(self.rotation.mT, self.translation))

    def to(self, target: torch.device | torch.dtype) -> Rigid:
        """Move the collection to another device or dtype."""
        return Rigid(self.rotation.to(target), self.translation.to(target))

    def to_quaternion7(self) -> Tensor:
        """Convert to [*, 7]: the unit quaternion w x y z with w >= 0, then the translation."""
        return torch.cat([rotation_to_quaternion(self.rotation), self.translation], dim=-1)

    def to_flat12(self) -> Tensor:
        """Convert to [*, 12]: the rotation row by row, then the translation (AF2's `rigidgroups_gt_frames`)."""
        return torch.cat([self.rotation.flatten(-2), self.translation], dim=-1)

    def to_matrix(self) -> Tensor:
        """Convert to [*, 3, 4]: the rotation, and the translation as the last column."""
        return torch.cat([self.rotation, self.translation[..., None]], dim=-1)

    @staticmethod
    def identity(shape: Sequence[int], *, dtype: torch.dtype | None = None, device: Any = None) -> Rigid:
        """Return a collection of identities of this shape."""
        eye = torch.eye(3, dtype=dtype, device=device).expand(*shape, 3, 3)
        return Rigid(eye, torch.zeros(*shape, 3, dtype=dtype, device=device))

    @staticmethod
    def from_quaternion7(affine: Tensor) -> Rigid:
        """Convert from [*, 7]: the unit quaternion w x y z, which is not normalised here, then the translation."""
        quaternion, translation = affine.split((4, 3), -1)
        return Rigid(quaternion_to_rotation(quaternion), translation)

    @staticmethod
    def from_flat12(flat: Tensor) -> Rigid:
        """Convert from [*, 12]: the rotation row by row, then the translation."""
        rotation, translation = flat.split((9, 3), -1)
        return Rigid(rotation.unflatten(-1, (3, 3)), translation)

    @staticmethod
    def from_matrix(matrix: Tensor) -> Rigid:
        """Convert from [*, 3, 4]: the rotation, and the translation as the last column."""
        rotation, translation = matrix.split((3, 1), -1)
        return Rigid(rotation, translation.squeeze(-1))

    @staticmethod
    def from_axes(x_axis: Tensor, xy_plane: Tensor, origin: Tensor) -> Rigid:
        """Build the frame at `origin` with x along `x_axis`, `xy_plane` in the xy plane at positive y (Gram-Schmidt).

        All [*, 3]. The vectors may have any length. Collinear or zero vectors give a finite matrix with finite
        gradients that is not a rotation, so the caller must mask them.
        """
        x = normalize(x_axis)
        y = normalize(xy_plane - (xy_plane * x).sum(-1, keepdim=True) * x)
        return Rigid(torch.stack([x, y, torch.linalg.cross(x, y)], dim=-1), origin)

    @staticmethod
    def from_three_points(x1: Tensor, x2: Tensor, x3: Tensor) -> Rigid:
        """Build the frame with origin x2, x axis towards x3, and x1 in the xy plane (Algorithm 21, rigidFrom3Points).

        All [*, 3]. The backbone frame is `from_three_points(N, CA, C)`.
        """
        return Rigid.from_axes(x3 - x2, x1 - x2, x2)

    @staticmethod
    def stack(rigids: Sequence[Rigid], axis: int = 0) -> Rigid:
        """Stack collections of one shape along a new axis of `*` (negative counts from the end of `*`)."""
        return _join(torch.stack, rigids, axis)

    @staticmethod
    def cat(rigids: Sequence[Rigid], axis: int = 0) -> Rigid:
        """Concatenate collections along an axis of `*` (negative counts from the end of `*`)."""
        return _join(torch.cat, rigids, axis)


def _join(join: Callable[..., Tensor], rigids: Sequence[Rigid], axis: int) -> Rigid:
    rotation_axis, translation_axis = (axis, axis) if axis >= 0 else (axis - 2, axis - 1)
    rotations, translations = [r.rotation for r in rigids], [r.translation for r in rigids]
    return Rigid(join(rotations, dim=rotation_axis), join(translations, dim=translation_axis))


def rotate(rotation: Tensor, vectors: Tensor) -> Tensor:
    """Compute R v: [*, 3, 3], [*, 3] -> [*, 3]."""
    x, y, z = vectors[..., :1], vectors[..., 1:2], vectors[..., 2:]
    return rotation[..., 0] * x + rotation[..., 1] * y + rotation[..., 2] * z


def multiply(first: Tensor, second: Tensor) -> Tensor:
    """Multiply small matrices: [*, a, b], [*, b, c] -> [*, a, c]."""
    return (first[..., :, :, None] * second[..., None, :, :]).sum(-2)


def normalize(vectors: Tensor, eps: float = 1e-8) -> Tensor:
    """Compute v / sqrt(|v|^2 + eps) over the last axis. A zero vector gives zero, with a finite gradient."""
    return vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + eps)


@functools.cache
# An inference tensor in the cache could not be used in training.
@torch.inference_mode(False)
def _coefficients(name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return PRODUCT or ROTATION as [results, 16] on a device, cached because a copy waits for the device."""
    return torch.from_numpy(globals()[name].reshape(-1, 16)).to(device, dtype)


def _bilinear(name: str, first: Tensor, second: Tensor) -> Tensor:
    """Contract PRODUCT or ROTATION [results, i, j] with first_i and second_j: [*, 4], [*, 4] -> [*, results]."""
    products = (first[..., :, None] * second[..., None, :]).flatten(-2)
    return (products[..., None, :] * _coefficients(name, products.dtype, products.device)).sum(-1)


def quaternion_multiply(first: Tensor, second: Tensor) -> Tensor:
    """Multiply quaternions w x y z (the Hamilton product): [*, 4], [*, 4] -> [*, 4]."""
    return _bilinear("PRODUCT", first, second)


def quaternion_to_rotation(quaternion: Tensor) -> Tensor:
    """Convert [*, 4] w x y z to [*, 3, 3]. A quaternion of length l gives l^2 times its rotation."""
    return _bilinear("ROTATION", quaternion, quaternion).unflatten(-1, (3, 3))


def rotation_to_quaternion(rotation: Tensor) -> Tensor:
    """Convert [*, 3, 3] to unit quaternions [*, 4] w x y z with w >= 0.

    The matrix 4 q q^T is linear in R. Its row with the largest diagonal entry is the best conditioned multiple of q.
    """
    (xx, xy, xz), (yx, yy, yz), (zx, zy, zz) = (row.unbind(-1) for row in rotation.unbind(-2))
    rows = [
        [1 + xx + yy + zz, zy - yz, xz - zx, yx - xy],
        [zy - yz, 1 + xx - yy - zz, xy + yx, xz + zx],
        [xz - zx, xy + yx, 1 - xx + yy - zz, yz + zy],
        [yx - xy, xz + zx, yz + zy, 1 - xx - yy + zz],
    ]
    outer = torch.stack([torch.stack(row, dim=-1) for row in rows], dim=-2)
    best = outer.diagonal(dim1=-2, dim2=-1).argmax(-1)
    row = outer.gather(-2, best[..., None, None].expand(*best.shape, 1, 4)).squeeze(-2)
    q = row / torch.linalg.vector_norm(row, dim=-1, keepdim=True)
    return torch.where(q[..., :1] < 0, -q, q)


def update_affine(affine: Tensor, update: Tensor, rotation: Tensor | None = None) -> Tensor:
    """Compose backbone frames with an update (Algorithm 23, BackboneUpdate): [*, 7], [*, 6] -> [*, 7].

    update: b, c, d and the translation, in the local frame. The quaternion is multiplied by (1, b, c, d) and
    normalised. rotation: [*, 3, 3], the rotation of `affine`; None: it is computed here.
    """
    (quaternion, translation), (vector, shift) = affine.split((4, 3), -1), update.split((3, 3), -1)
    rotation = quaternion_to_rotation(quaternion) if rotation is None else rotation
    turned = quaternion_multiply(quaternion, torch.nn.functional.pad(vector, (1, 0), value=1.0))
    turned = turned / torch.linalg.vector_norm(turned, dim=-1, keepdim=True)
    new_translation = translation + multiply(rotation, shift[..., None]).squeeze(-1)
    return torch.cat([turned, new_translation], dim=-1)
