"""README's result table, written from the committed result files.

python -m benchmarks.table
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.cases import Case, peer_row
from benchmarks.results import RESULTS, ROOT, Row, geomean, load

BEGIN = "<!-- results: written by python -m benchmarks.table -->"
END = "<!-- end of results -->"
CLASSES = {"decode": "m <= 64", "mid": "m = 128 to 512", "large": "m >= 2048"}
LAYOUTS = {"contiguous": "contiguous", "masked": "masked", "psum": "prefix sums, no padding"}
GROUP_ROWS = (4096, 64, 0)  # classes of grouped rows: at least as many rows per group


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    readme = ROOT / "README.md"
    readme.write_text(rewrite(readme.read_text(), render(RESULTS)))


def rewrite(text: str, table: str) -> str:
    """`text` with what stands between the two markers replaced by `table`.

    Raises:
        ValueError: a marker is missing.
    """
    if BEGIN not in text or END not in text:
        raise ValueError(f"the text lacks the marker {BEGIN!r} or {END!r}")
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}"


def render(folder: Path) -> str:
    """Markdown for the h200_*.json files that are in `folder`."""
    parts = []
    if (path := folder / "h200_dense.json").exists():
        parts.append(dense_table(*load(path)))
    if (path := folder / "h200_grouped.json").exists():
        parts.append(grouped_table(*load(path)))
    if (path := folder / "h200_sustained.json").exists():
        parts.append(sustained_table(load(path)[1]))
    if (path := folder / "h200_host.json").exists():
        parts.append(host_line(load(path)[1]))
    return "\n\n".join(parts) if parts else "No results yet."


def dense_table(meta: Row, rows: list[Row]) -> str:
    """Per size class: our time over `torch._scaled_mm`'s, DeepGEMM's over it, and our speed."""
    lines = [
        "| Dense GEMM | shapes | T, geomean | T, worst shape | DeepGEMM's T | best of ours |",
        "|--|--|--|--|--|--|",
    ]
    for name, sizes in CLASSES.items():
        members = [row for row in rows if _case(row).size_class == name]
        if not members:
            continue
        worst = max(members, key=lambda row: row["ratio_to_tensor"])
        if name == "decode":
            best = f"{max(row['gb_per_s'] for row in members) / 1e3:.2f} TB/s"
        else:
            best = f"{max(row['tflops'] for row in members):.0f} TFLOPS"
        lines.append(
            f"| {sizes} | {len(members)} | **{_mean(members):.2f}** "
            f"| {worst['ratio_to_tensor']:.2f} ({_case(worst)}) "
            f"| {geomean(_deepgemm(members)):.2f} | {best} |"
        )
    lines.append(
        f"| all | {len(rows)} | **{_mean(rows):.2f}** | | {geomean(_deepgemm(rows)):.2f} | |"
    )
    lines += [
        "",
        "T is the time over that of `torch._scaled_mm` in the same run, which has one scale per "
        "tensor and so does less: T = 1 means that fine-grained scaling costs nothing. Below 1 is "
        "better. DeepGEMM (June 2025) was measured by the same method in a run of its own.",
        f"Measured on one {meta['gpu']}, driver {meta['driver']}, CUDA {meta['cuda']}, torch "
        f"{meta['torch']}, {meta['date']}, commit {meta['commit']}; kernel time by CUPTI, L2 "
        "flushed by reading 512 MB before each call, random normal data really quantised, median "
        "of 20.",
    ]
    return "\n".join(lines)


def grouped_table(meta: Row, rows: list[Row]) -> str:
    """Per layout and rows per group: our speed, and how far ahead of DeepGEMM and Triton it is."""
    lines = [
        "| Grouped GEMM | rows per group | cases | TFLOPS | share of read speed | DeepGEMM / ours "
        "| Triton / ours |",
        "|--|--|--|--|--|--|--|",
    ]
    classes: dict[tuple[str, int], list[Row]] = {
        (layout, least): [] for layout in LAYOUTS for least in GROUP_ROWS
    }
    for row in rows:
        least = next(each for each in GROUP_ROWS if row["m_per_group"] >= each)
        classes[row["layout"], least].append(row)
    for (layout, _), members in classes.items():
        if members:
            cells = (
                LAYOUTS[layout],
                _range([row["m_per_group"] for row in members]),
                str(len(members)),
                _range([row["tflops"] for row in members]),
                _spread([row["floor_us"] / row["us"] for row in members]),
                _spread([row["ratio_to_deepgemm"] for row in members if row["ratio_to_deepgemm"]]),
                _spread([row["triton_us"] / row["us"] for row in members if row["triton_us"]]),
            )
            lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "Ratios are of times, geomean (worst case): above 1 we are faster. Only rows that belong "
        "to a group count, padding never does. The share of read speed is the time to move every "
        "byte once at 4.55 TB/s over ours: few rows per group are bound by it, many by the tensor "
        "cores. "
        "DeepGEMM (June 2025) was measured by the same method in a run of its own, and so was "
        "Triton (SGLang's kernel) on those cases; on the others it is the kernel in "
        "`benchmarks/triton_grouped.py`, the best of several builds, in the same run. "
        + _padding_line(rows)
        + f"Measured on one {meta['gpu']}, {meta['date']}, commit {meta['commit']}.",
    ]
    return "\n".join(lines)


def _padding_line(rows: list[Row]) -> str:
    """What the prefix-sum layout takes of the time of the padded layout of the same rows."""
    times = {
        (row["groups"], row["m_per_group"], row["n"], row["k"], row["layout"]): row["us"]
        for row in rows
    }
    ratios: dict[str, list[float]] = {}
    for (*family, layout), us in times.items():
        psum_us = times.get((*family, "psum"))
        if layout != "psum" and psum_us:
            ratios.setdefault(layout, []).append(psum_us / us)
    if not ratios:
        return ""
    parts = " and ".join(
        f"{geomean(each):.2f} ({max(each):.2f}) of the {layout} layout's"
        for layout, each in ratios.items()
    )
    return f"The same rows as prefix sums take {parts} time. "


def sustained_table(rows: list[Row]) -> str:
    """TFLOPS of one second back to back."""
    lines = [
        "| One second back to back, TFLOPS | ours | `torch._scaled_mm` | cuBLASLt, block scales "
        "| SM clock | power |",
        "|--|--|--|--|--|--|",
    ]
    for row in rows:
        times = row["us"], row["cublaslt_tensor_us"], row["cublaslt_block_us"]
        speeds = " | ".join(f"{_case(row).flops / us / 1e6:.0f}" if us else "-" for us in times)
        clock = f"{row['sm_mhz']} MHz" if row["sm_mhz"] else "-"
        power = f"{row['power_w']:.0f} W" if row["power_w"] else "-"
        lines.append(f"| {_case(row)} | {speeds} | {clock} | {power} |")
    return "\n".join(lines)


def host_line(rows: list[Row]) -> str:
    """Host time of every call that was timed."""
    times = ", ".join(f"{row['op']} {row['us']:.1f}" for row in rows)
    return f"Host time per call in microseconds: {times}."


def _range(values: list[float]) -> str:
    low, high = f"{min(values):.0f}", f"{max(values):.0f}"
    return low if low == high else f"{low} to {high}"


def _spread(ratios: list[float]) -> str:
    return f"**{geomean(ratios):.2f}** ({min(ratios):.2f})" if ratios else ""


def _case(row: Row) -> Case:
    return Case(row["m"], row["n"], row["k"])


def _mean(rows: list[Row]) -> float:
    return geomean(row["ratio_to_tensor"] for row in rows)


def _deepgemm(rows: list[Row]) -> list[float]:
    found = [peer_row("dense", _case(row)) for row in rows]
    return [each["deepgemm_us"] / each["cublaslt_tensor_us"] for each in found if each]


if __name__ == "__main__":
    main()
