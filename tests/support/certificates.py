"""A certificate authority of nobody, and a server's context with its certificate. For tests."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest


def server_context(folder: Path) -> tuple[ssl.SSLContext, Path]:
    """For a server on 127.0.0.1 and localhost, and the file with the authority's certificate."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("there is no openssl to make a certificate with")

    def run(*arguments: str) -> None:
        subprocess.run([openssl, *arguments], check=True, capture_output=True, cwd=folder)

    ca = ["-x509", "-days", "2", "-subj", "/CN=nobody's authority", "-keyout", "ca.key", "-out", "ca.pem"]
    run("req", "-newkey", "rsa:2048", "-nodes", *ca)
    run("req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=hub", "-keyout", "hub.key", "-out", "hub.csr")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    signed = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names", "-days", "2"]
    run("x509", "-req", "-in", "hub.csr", *signed, "-out", "hub.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "hub.pem", folder / "hub.key")
    return context, folder / "ca.pem"
