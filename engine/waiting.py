"""The waiting requests, indexed so that finding whom to serve next never sorts the queue.

Order of service: higher effective priority first; at equal priority the two service classes take
turns and, within a class, the tenant that has been served least; within a tenant by arrival. Age
is kept apart from priority: see `candidates`. Not for deciding whether a request fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace

from engine.request import Request

AGING_NS = 5_000_000_000
"""A request that has waited this long is served by age."""

AGING_TURN = 4
"""While aged requests wait, every fourth admission is the oldest of them: a request with n older
ones is admitted after at most AGING_TURN * (n + 1) admissions, whatever arrives later."""

LONG_TURN = 4
"""At equal priority, every fourth admission is of the long class if one waits."""

MAX_IDLE_TENANTS = 4096

_Entry = tuple[int, int, Request]


@dataclass(slots=True)
class Tenant:
    """A tenant's account: tokens served so far (the virtual time of fair sharing), and how many
    of its requests are in the engine."""

    served: int = 0
    requests: int = 0


@dataclass(slots=True)
class _Level:
    """Waiting requests of one service class and one priority. `order` is a heap of (tokens served
    when pushed, tie-break, tenant); `served` only grows, so a stale key is too small and is
    corrected when it comes to the top."""

    queues: dict[str, list[_Entry]] = field(default_factory=dict)
    order: list[tuple[int, int, str]] = field(default_factory=list)


class WaitingQueue:
    """All waiting requests. Removal is lazy: an entry counts only while its request is a member."""

    def __init__(self) -> None:
        self.tenants: dict[str, Tenant] = {}
        self._members: dict[int, Request] = {}
        self._by_age: list[_Entry] = []
        self._levels: dict[bool, dict[int, _Level]] = {True: {}, False: {}}
        self._virtual = 0
        self._tie = 0
        self._since_aged = 0
        self._since_long = 0

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._members.values())

    def enter(self, request: Request) -> None:
        """Account for a request new to the engine. A tenant that was idle starts at the present
        virtual time: idleness earns no credit."""
        tenant = self.tenants.get(request.tenant)
        if tenant is None:
            tenant = self.tenants[request.tenant] = Tenant()
        if tenant.requests == 0:
            tenant.served = max(tenant.served, self._virtual)
        tenant.requests += 1

    def leave(self, request: Request) -> None:
        """Account for a request that has ended."""
        self.tenants[request.tenant].requests -= 1
        if len(self.tenants) > MAX_IDLE_TENANTS:
            self._forget_idle()

    def push(self, request: Request) -> None:
        """Let a request wait, at the place its arrival gives it."""
        self._members[request.slot] = request
        heappush(self._by_age, (request.arrival_ns, request.slot, request))
        self._index(request)
        if len(self._by_age) > 2 * len(self._members) + 64:
            self.rebuild()

    def remove(self, request: Request) -> None:
        """Take a request out (admitted, aborted or failed)."""
        del self._members[request.slot]

    def admitted(self, request: Request, *, aged: bool) -> None:
        """Take out a request that is admitted, and advance the turns and the virtual time."""
        self.remove(request)
        self._since_aged = 0 if aged else self._since_aged + 1
        self._since_long = self._since_long + 1 if request.is_short else 0
        self._virtual = max(self._virtual, self.tenants[request.tenant].served)

    def rebuild(self) -> None:
        """Index everything anew: after priorities have changed, or to shed stale entries."""
        self._by_age = [(r.arrival_ns, r.slot, r) for r in self._members.values()]
        heapify(self._by_age)
        self._levels = {True: {}, False: {}}
        for _, _, request in sorted(self._by_age, key=lambda entry: entry[:2]):
            self._index(request)

    def candidates(self, now_ns: int) -> list[tuple[Request, bool]]:
        """Whom to admit next, best first, each with whether it is its age's turn. The second is
        of the other service class, for when the first is held back by its class's limit."""
        best = [
            found
            for found in (self._best(short=True), self._best(short=False))
            if found is not None
        ]
        if len(best) == 2 and self._long_first(*best):
            best.reverse()
        picked = [(request, False) for request in best]
        if self._since_aged >= AGING_TURN - 1:
            oldest = self.oldest()
            if oldest is not None and now_ns - oldest.arrival_ns >= AGING_NS:
                picked.insert(0, (oldest, True))
        return picked

    def oldest(self) -> Request | None:
        """The waiting request that arrived first."""
        while self._by_age:
            request = self._by_age[0][2]
            if request.slot in self._members:
                return request
            heappop(self._by_age)
        return None

    def _long_first(self, short: Request, long: Request) -> bool:
        if long.effective != short.effective:
            return long.effective > short.effective
        return self._since_long >= LONG_TURN - 1

    def _index(self, request: Request) -> None:
        levels = self._levels[request.is_short]
        level = levels.get(request.effective)
        if level is None:
            level = levels[request.effective] = _Level()
        queue = level.queues.get(request.tenant)
        if queue is None:
            queue = level.queues[request.tenant] = []
            self._tie += 1
            served = self.tenants[request.tenant].served
            heappush(level.order, (served, self._tie, request.tenant))
        heappush(queue, (request.arrival_ns, request.slot, request))

    def _best(self, *, short: bool) -> Request | None:
        levels = self._levels[short]
        while levels:
            priority = max(levels)
            request = self._first(levels[priority])
            if request is not None:
                return request
            del levels[priority]
        return None

    def _first(self, level: _Level) -> Request | None:
        order = level.order
        while order:
            served, tie, name = order[0]
            queue = level.queues[name]
            while queue and queue[0][1] not in self._members:
                heappop(queue)
            if not queue:
                heappop(order)
                del level.queues[name]
                continue
            actual = self.tenants[name].served
            if actual == served:
                return queue[0][2]
            heapreplace(order, (actual, tie, name))
        return None

    def _forget_idle(self) -> None:
        for name, tenant in list(self.tenants.items()):
            if tenant.requests == 0 and tenant.served <= self._virtual:
                del self.tenants[name]
