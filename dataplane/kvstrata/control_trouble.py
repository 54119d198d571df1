"""What to do about a control plane that can't be talked to: there is none, or it is spoken to in
the wrong way."""

from __future__ import annotations

import ssl

__all__ = ["hint"]

# Of OpenSSL's X509_V_ERR_*: times that are not now, names that are not the one that was dialled.
_NOT_NOW = (9, 10)
_ANOTHER_NAME = (62, 63, 64)


def hint(url: str, error: BaseException) -> str:
    """What is probably wrong, as a phrase, where this error came instead of an answer of `url`."""
    if not url.startswith("https:"):
        # The end of a connection without a word is how TLS answers what isn't.
        if _silent(error):
            return "if it serves TLS, its address begins with https://"
        return "does `kvstrata server` run there?"
    tls = _tls_error(error)
    if tls is None:
        return "does `kvstrata server` run there?"
    if not isinstance(tls, ssl.SSLCertVerificationError):
        return "if it serves no TLS, its address begins with http://"
    if tls.verify_code in _NOT_NOW:
        return "give the server a certificate that is valid now; or is a clock wrong?"
    if tls.verify_code in _ANOTHER_NAME:
        return "name the server as its certificate does, or have one issued for this name"
    return (
        "if its issuer is your own, name that one's certificate: control.ca of a node, --ca or "
        "KVSTRATA_CA of a command"
    )


def _silent(error: BaseException) -> bool:
    import httpx

    return isinstance(error, httpx.RemoteProtocolError | httpx.ReadError)


def _tls_error(error: BaseException) -> ssl.SSLError | None:
    """What it came of, if that was TLS."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLError):
            return cause
        cause = cause.__cause__ or cause.__context__
    return None
