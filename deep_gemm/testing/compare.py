"""The project's own check of a GEMM result against its reference: global, per tile, per row.

A global figure alone hides damage: one dead 128x128 tile of a 4096x7168 output moves it by 2.8e-4
only. Hence every tile and every row has to pass by itself, and NaN never passes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

TILE = 128
DEFAULT_TOL = 1e-5


class Errors(NamedTuple):
    """Relative squared errors (`calc_diff`): of the whole, of the worst tile, of the worst row."""

    total: float
    tile: float
    row: float


def compare(
    out: torch.Tensor,
    ref: torch.Tensor,
    *,
    tol: float = DEFAULT_TOL,
    tile_tol: float | None = None,
    row_tol: float | None = None,
    name: str = "out",
) -> Errors:
    """Check `out` [..., n] against `ref` of the same shape and any float dtype; return the errors.

    `ref` is first rounded to the dtype of `out`. NaN and infinities have to stand at the same
    places; then the squared error relative to the squared values is held against `tol` for the
    whole, `tile_tol` for each 128x128 tile and `row_tol` for each row (both default to `tol`).
    Differences of one subnormal step are no error. Leading dimensions are flattened into rows.

    Raises AssertionError with the place of the worst element.
    """
    if out.shape != ref.shape:
        raise AssertionError(f"{name}: shape {tuple(out.shape)}, expected {tuple(ref.shape)}")
    if out.numel() == 0:
        return Errors(0.0, 0.0, 0.0)
    width = out.shape[-1]
    out = out.detach().reshape(-1, width)
    ref = ref.detach().to(out.device, out.dtype).reshape(-1, width)
    _check_positions(name, "NaN", out, ref, out.isnan(), ref.isnan())
    for sign, value in (("+inf", float("inf")), ("-inf", -float("inf"))):
        _check_positions(name, sign, out, ref, out == value, ref == value)

    tile_errors, row_errors, total = _relative_errors(out, ref)
    errors = Errors(total, float(tile_errors.max()), float(row_errors.max()))
    if not errors.total <= tol:
        raise AssertionError(
            f"{name}: error {total:.3e} of the whole, limit {tol:.1e}; {_worst(out, ref, 0, 0)}"
        )
    limit = tol if tile_tol is None else tile_tol
    if not errors.tile <= limit:
        row, column = divmod(int(tile_errors.argmax()), tile_errors.shape[1])
        row, column = row * TILE, column * TILE
        tile = slice(row, row + TILE), slice(column, column + TILE)
        raise AssertionError(
            f"{name}: error {errors.tile:.3e} in the {TILE}x{TILE} tile at row {row}, column "
            f"{column}, limit {limit:.1e}; {_worst(out[tile], ref[tile], row, column)}"
        )
    limit = tol if row_tol is None else row_tol
    if not errors.row <= limit:
        row = int(row_errors.argmax())
        raise AssertionError(
            f"{name}: error {errors.row:.3e} in row {row}, limit {limit:.1e}; "
            f"{_worst(out[row : row + 1], ref[row : row + 1], row, 0)}"
        )
    return errors


def _check_positions(
    name: str,
    what: str,
    out: torch.Tensor,
    ref: torch.Tensor,
    in_out: torch.Tensor,
    in_ref: torch.Tensor,
) -> None:
    wrong = in_out != in_ref
    if wrong.any():
        row, column = divmod(int(wrong.flatten().int().argmax()), out.shape[1])
        raise AssertionError(
            f"{name}: {int(in_out.sum())} {what}, expected {int(in_ref.sum())}; the first "
            f"difference is at row {row}, column {column}: {out[row, column].item()!r}, expected "
            f"{ref[row, column].item()!r}"
        )


def _relative_errors(
    out: torch.Tensor, ref: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Errors per tile [rows / 128, columns / 128], per row [rows], and of the whole."""
    num_columns = -(-out.shape[1] // TILE)
    padding = num_columns * TILE - out.shape[1]
    squares, energies = [], []
    for out_rows, ref_rows in zip(
        out.split(TILE), ref.split(TILE), strict=True
    ):  # small temporaries
        x, y = _finite(out_rows), _finite(ref_rows)
        pair = torch.stack((_difference(x, y, out.dtype).square(), x.square() + y.square()))
        pair = torch.nn.functional.pad(pair, (0, padding)).view(2, len(x), num_columns, TILE)
        square, energy = pair.sum(dim=3)
        squares.append(square)
        energies.append(energy)
    tiles = _ratio(
        torch.stack([square.sum(dim=0) for square in squares]),
        torch.stack([energy.sum(dim=0) for energy in energies]),
    )
    square, energy = torch.cat(squares).sum(dim=1), torch.cat(energies).sum(dim=1)
    return tiles, _ratio(square, energy), float(_ratio(square.sum(), energy.sum()))


def _finite(x: torch.Tensor) -> torch.Tensor:
    return x.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _difference(x: torch.Tensor, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    info = torch.finfo(dtype)
    difference = (x - y).abs()
    return difference.where(difference > info.smallest_normal * info.eps, 0.0)


def _ratio(square: torch.Tensor, energy: torch.Tensor) -> torch.Tensor:
    return torch.where(square == 0, 0.0, square / energy)


def _worst(out: torch.Tensor, ref: torch.Tensor, row: int, column: int) -> str:
    x, y = _finite(out), _finite(ref)
    i, j = divmod(int((x - y).abs().argmax()), out.shape[1])
    return (
        f"the worst element is at row {row + i}, column {column + j}: {out[i, j].item():.6g}, "
        f"expected {ref[i, j].item():.6g}"
    )
