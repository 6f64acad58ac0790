"""Which of this host's network interfaces leads to another host: gloo needs its name, and guesses by host name."""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

_SIOCGIFADDR = 0x8915  # Linux: the address of an interface


def interface_to(host: str) -> str | None:
    """The name of the interface that packets to `host` leave by; None where that can't be told."""
    with suppress(OSError, ImportError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        import fcntl  # not on every system

        probe.connect((host, 9))  # sends nothing
        address = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if answer[20:24] == address:
                    return name
    return None
