"""`llmrun quantize --size` beside the presets: a mix of the size of each, and how far both are from the source.

    python mix.py SOURCE.gguf TEXT [--imatrix FILE] [--chunks 8] [PRESET ...]

SOURCE should be in F16 or BF16. TEXT is read from its end, and nothing that the mix is chosen by comes from it. The
last column is the mean Kullback-Leibler divergence of the mix over that of the best preset of its size or smaller.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from llmrun.quantize import mix
from llmrun.quantize.evaluate import EvaluatedText, evaluate
from llmrun.quantize.job import QuantizeRequest, quantize

_PRESETS = ["Q4_0", "IQ4_NL", "Q4_K_M", "Q5_K_M", "Q6_K"]
_CONTEXT = 512
_CHARACTERS = 8  # of the text for each token at most


def main() -> None:
    """Compare, and print a line for each preset."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("presets", nargs="*", default=[])
    parser.add_argument("--imatrix", type=Path)
    parser.add_argument("--chunks", type=int, default=8)
    arguments = parser.parse_args()
    content = arguments.text.read_text(encoding="utf-8")[-_CHARACTERS * _CONTEXT * arguments.chunks :]
    with tempfile.TemporaryDirectory(dir=arguments.source.resolve().parent) as folder:
        files = _Files(arguments.source.resolve(), Path(folder) / "try.gguf", content, arguments)
        presets: list[tuple[int, float, str]] = []
        for name in arguments.presets or _PRESETS:
            presets.append(
                (*files.quantized(QuantizeRequest(files.source, files.target, name, imatrix=files.imatrix)), name)
            )
        for n_bytes, _, name in sorted(presets):
            _compare(files, name, n_bytes, presets)


class _Files:
    """What is quantized, where to, and how it is measured."""

    def __init__(self, source: Path, target: Path, content: str, arguments: argparse.Namespace) -> None:
        self.source, self.target, self.imatrix = source, target, arguments.imatrix
        self._text = EvaluatedText("the text's end", content)
        self._chunks = arguments.chunks

    def quantized(self, request: QuantizeRequest) -> tuple[int, float]:
        """Bytes of a file, and its divergence from the source."""
        n_bytes = quantize(request).n_bytes
        found = evaluate(
            self.target, reference=self.source, text=self._text, n_ctx=_CONTEXT, chunks=self._chunks
        ).divergence
        assert found is not None
        return n_bytes, found.mean.value


def _compare(files: _Files, name: str, n_bytes: int, presets: list[tuple[int, float, str]]) -> None:
    best = min((kld, kind) for size, kld, kind in presets if size <= n_bytes)
    began = time.monotonic()
    chosen = mix.choose(files.source, n_bytes, imatrix=files.imatrix)
    seconds = time.monotonic() - began
    request = QuantizeRequest(
        files.source, files.target, chosen.base, overrides=chosen.overrides, imatrix=files.imatrix
    )
    size, kld = files.quantized(request)
    print(
        f"{name}, {n_bytes:,} bytes: best preset {best[1]}, KLD {best[0]:.5f}; mix {size / n_bytes:.2%} of that, "
        f"KLD {kld:.5f} (expected {chosen.divergence:.5f}), chosen in {seconds:.0f} s: {kld / best[0]:.2f}x",
        flush=True,
    )


if __name__ == "__main__":
    main()
