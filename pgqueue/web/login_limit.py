"""How often a secret may be tried: a few wrong ones a minute from one address. In memory, for one process.

A wrong secret of the login and a wrong bearer token count alike. At the login, an address that has used up its tries is
refused before its secret is looked at, right or wrong: people sign in once. A right bearer token is let in all the
same: programs send it with each request, and one with a wrong token must not lock out others behind its proxy. Visitors
with a cookie are not asked for a secret.

So bearer tokens can be guessed without this limit. What keeps them is their length, of 20 characters or more.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict, deque
from collections.abc import Callable

from pgqueue.steady_clock import monotonic
from pgqueue.web.access import address_of

TRIES = 5
WINDOW_SECONDS = 60.0
ADDRESSES_MOST = 10_000
"""So many addresses are remembered; the one that was wrong longest ago is forgotten first."""


class LoginLimit:
    """Counts wrong secrets by address. `clock` is for tests."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._wrong: OrderedDict[str, deque[float]] = OrderedDict()

    def wait(self, address: str) -> float:
        """Seconds until this address may try again; 0 if it may now."""
        times = self._wrong.get(_group(address))
        if times is None or len(times) < TRIES:
            return 0.0
        return max(0.0, times[0] + WINDOW_SECONDS - self._clock())

    def wrong(self, address: str) -> None:
        """This address has given a wrong secret."""
        group = _group(address)
        times = self._wrong.setdefault(group, deque(maxlen=TRIES))
        times.append(self._clock())
        self._wrong.move_to_end(group)
        while len(self._wrong) > ADDRESSES_MOST:
            self._wrong.popitem(last=False)


def _group(address: str) -> str:
    """An IPv4 address; of IPv6 the network of 64 bits, for one machine has all of its addresses.

    What is no address is one group: else each connection could bring another name.

    >>> _group("2001:db8::1") == _group("2001:db8::2"), _group("192.0.2.1") == _group("192.0.2.2")
    (True, False)
    """
    found = address_of(address)
    if isinstance(found, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((found, 64), strict=False))
    return str(found)
