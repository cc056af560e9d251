"""Makes wheels that pip accepts."""

from __future__ import annotations

import io
import zipfile


def wheel(package: str, version: str, members: dict[str, bytes]) -> bytes:
    """The bytes of a wheel with these files in it; `package` as in the wheel's file name."""
    info = f"{package}-{version}.dist-info"
    own = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in (members | own).items():
            archive.writestr(name, content)
    return out.getvalue()
