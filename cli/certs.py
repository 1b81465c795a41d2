"""`pdserve certs`: an authority and certificates for trying mutual TLS. Deployments have an authority of their own.

The files have the names that Kubernetes gives to them: ca.crt, ca.key, tls.crt, tls.key. A second run keeps the
authority and makes a new certificate, which running processes take for their next connections.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

from pdserve.core.config import Parser
from pdserve.core.errors import ConfigError

FILES = {"ca.key", "ca.crt", "tls.key", "tls.crt"}

DESCRIPTION = """\
Make an authority (once) and a certificate for mutual TLS between routers and workers, to try it or to test with.

  pdserve certs DIR
  pdserve up --tls-cert-file DIR/tls.crt --tls-key-file DIR/tls.key --tls-ca-file DIR/ca.crt --require-tls"""


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit status."""
    parser = Parser("pdserve certs", DESCRIPTION)
    parser.add_argument("directory", metavar="DIR", help="where the files are written; made if it is missing")
    parser.add_argument("--days", type=int, default=30, help="how long the certificate is valid (default: 30)")
    parser.add_argument("--tls-peer-name", default="pdserve", help="the members' name in it (default: pdserve)")
    args = parser.parse_args(argv)
    if not 1 <= args.days <= 3650:
        raise ConfigError(f"--days is {args.days}; it must be 1 to 3650")
    from pdserve.cli.authority import Authority  # needs the extra: not for --help
    from pdserve.core.tls import check_peer_name

    check_peer_name(args.tls_peer_name)
    directory = Path(args.directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if {path.name for path in directory.iterdir()} <= FILES:
            (directory / ".gitignore").write_text("*\n")  # before the keys: a repository never sees them
        authority = Authority.in_directory(directory)
        authority.issue(directory, name=args.tls_peer_name, lifetime=datetime.timedelta(days=args.days))
    except OSError as e:
        raise ConfigError(f"cannot write to {directory}: {e.strerror}") from e
    print(f"{directory}: authority ca.crt, certificate tls.crt and tls.key for {args.days} days. Use them with")
    print(
        f"  --tls-cert-file {directory / 'tls.crt'} --tls-key-file {directory / 'tls.key'} "
        f"--tls-ca-file {directory / 'ca.crt'} --tls-peer-name {args.tls_peer_name}"
    )
    return 0
