"""What the rows of a batch consist of: their tokens, as sessions of a namespace."""

from __future__ import annotations

from array import array
from typing import Any, List, Optional, Sequence, Tuple

import torch
from kvtier import InvalidError, Namespace, Session

from ._errors import invalid

#: What a forward pass may be given beside ids, and KV still depends on the ids alone.
_HARMLESS = frozenset((
    "input_ids", "attention_mask", "position_ids", "cache_position", "labels", "logits_to_keep",
    "num_logits_to_keep",
))


def as_rows(tokens: Any) -> List[List[int]]:
    """Token ids as a list a row: of a tensor or an array of one or two dimensions, or of lists."""
    if isinstance(tokens, torch.Tensor) or hasattr(tokens, "tolist"):
        tokens = tokens.tolist()
    rows = list(tokens)
    if not rows or not isinstance(rows[0], (list, tuple)):
        rows = [rows]
    rows = [[int(token) for token in row] for row in rows]
    if len({len(row) for row in rows}) != 1:
        raise invalid("rows of different lengths: pad them on the left, and give attention_mask=")
    if any(not 0 <= token < 1 << 32 for row in rows for token in row):
        raise invalid("token ids are integers from 0 to 2**32 - 1")
    return rows


def pads_of(mask: Any, rows: int, tokens: int) -> List[int]:
    """How many slots of padding each row begins with; fails on any other mask."""
    if mask is None:
        return [0] * rows
    given = torch.as_tensor(mask)
    if given.ndim == 1:
        given = given.unsqueeze(0)
    if given.ndim != 2 or given.shape[0] != rows or given.shape[1] < tokens:
        raise invalid(f"an attention_mask of {list(given.shape)} for {rows} rows of {tokens} "
                      "tokens")
    ones = given[:, :tokens].bool()
    pads = [tokens - int(n) for n in ones.sum(1)]
    for row, pad in zip(ones, pads):
        if not bool(row[pad:].all()):
            raise invalid("an attention_mask with zeros behind ones: only padding on the left "
                          "can be stored")
    return pads


class Line:
    """A session and its tokens."""

    __slots__ = ("session", "tokens")

    def __init__(self, session: Session, tokens: Sequence[int] = ()) -> None:
        self.session, self.tokens = session, array("I", tokens)


class Rows:
    """The rows of one cache. Ids are taken from forward passes as they are, and read (which waits
    for a GPU) once a chunk is full. Two rows of a beam share a session until they differ."""

    def __init__(self, space: Namespace, tenant: int = 0) -> None:
        self._space, self._tenant = space, tenant
        self._lines: List[Line] = []
        self.pads: List[int] = []
        #: Slots, padding with them, whose ids the sessions have.
        self.named = 0
        #: Slots whose ids were given.
        self.noted = 0
        #: Why ids are not known: nothing is stored as long as this is so.
        self.blind = ""
        self._ids: List[torch.Tensor] = []
        self._positions: List[Optional[torch.Tensor]] = []
        self._mask: Optional[torch.Tensor] = None

    @property
    def sessions(self) -> List[Session]:
        """One a row."""
        return [line.session for line in self._lines]

    def note(self, ids: Any, kwargs: Any) -> None:
        """A forward pass is about to begin."""
        if self.blind:
            return
        for name, value in kwargs.items():
            if isinstance(value, torch.Tensor) and name not in _HARMLESS:
                self.blind = f"the model was given {name}, of which tokens say nothing"
                return
        if ids is None or ids.ndim != 2:
            self.blind = "the model was given no input_ids of [batch, tokens]"
            return
        self._ids.append(ids)
        self._positions.append(kwargs.get("position_ids"))
        mask = kwargs.get("attention_mask")
        if mask is not None:
            self._mask = mask
        self.noted += ids.shape[1]

    def name(self) -> bool:
        """Has the sessions know all ids that were noted; False when something is unknown."""
        if self.blind or not self._ids:
            return not self.blind
        try:
            ids, why = self._checked()
        except InvalidError as error:
            ids, why = [], str(error)
        if why:
            self.blind = why
            return False
        self._append(ids)
        return True

    def _checked(self) -> Tuple[List[List[int]], str]:
        """The ids that are new, a list a row, and what is wrong with the passes."""
        joined = torch.cat(self._ids, 1)
        pads = [0] * joined.shape[0]
        if self._mask is not None:
            if self._mask.ndim != 2:
                return [], "the model was given an attention_mask that is not [batch, tokens]"
            seen = min(self.noted, self._mask.shape[1])
            pads = pads_of(self._mask, joined.shape[0], seen)
            if any(pads) and seen < self.noted:
                return [], "the attention_mask does not reach the last token"
        if not self._lines:
            self._open(pads)
        elif self._mask is not None and pads != self.pads:
            return [], "the attention_mask has changed"
        if joined.shape[0] != len(self._lines):
            return [], f"{joined.shape[0]} rows after {len(self._lines)}"
        if not self._in_order(joined):
            return [], "position_ids do not count the tokens of each row from 0"
        return joined.tolist(), ""

    def _in_order(self, joined: torch.Tensor) -> bool:
        """Whether positions are those that tokens have by themselves. A pass that was given none
        has its slots for positions, which is the same without padding alone."""
        at = self.named
        for ids, given in zip(self._ids, self._positions):
            slots = torch.arange(at, at + ids.shape[1])
            at += ids.shape[1]
            if given is None:
                if any(self.pads):
                    return False
                continue
            if given.ndim != 2:
                return False
            want = slots - torch.tensor(self.pads)[:, None]
            real = want >= 0
            have = given.to("cpu").expand(want.shape)
            if not bool((have == want)[real].all()):
                return False
        return True

    def _open(self, pads: Sequence[int]) -> None:
        self.pads = list(pads)
        self._lines = [Line(self._space.session(tenant=self._tenant)) for _ in self.pads]

    def _append(self, ids: List[List[int]]) -> None:
        """Adds the slots after `named`."""
        seen = set()
        for at, line in enumerate(self._lines):  # before any of them changes
            if id(line) in seen:
                fork = line.session.fork(tenant=self._tenant)
                self._lines[at] = line = Line(fork, line.tokens)
            seen.add(id(line))
        for line, pad, row in zip(self._lines, self.pads, ids):
            real = array("I", row[max(0, pad - self.named):])
            if real:
                line.session.append(real)
                line.tokens.extend(real)
        self.named += len(ids[0])
        self._ids, self._positions = [], []

    def assign(self, ids: List[List[int]], pads: Sequence[int]) -> None:
        """Begins anew with these."""
        self.clear()
        self._open(pads)
        self._append(ids)
        self.noted = self.named

    def own(self, row: int) -> int:
        """Tokens that the row's session has, padding left out."""
        return max(0, self.named - self.pads[row])

    def has(self, row: int, tokens: Sequence[int]) -> bool:
        """Whether these are the first tokens of a row."""
        return self._lines[row].tokens[:len(tokens)] == array("I", tokens)

    def cut(self, slots: int) -> None:
        """Forgets what is behind so many slots."""
        if slots >= self.noted:
            return
        if slots < self.named:
            self._ids, self._positions = [], []
            for line, pad in zip(self._lines, self.pads):
                left_over = max(0, slots - pad)
                if len(line.tokens) > left_over:  # beams may share it
                    line.session.truncate(left_over)
                    del line.tokens[left_over:]
            self.named = slots
        else:
            left, at = [], self.named
            for ids, given in zip(self._ids, self._positions):
                n = min(ids.shape[1], slots - at)
                if n > 0:
                    left.append((ids[:, :n], None if given is None else given[..., :n]))
                at += ids.shape[1]
            self._ids, self._positions = [a for a, _ in left], [b for _, b in left]
        if self._mask is not None:  # padding is known once there are sessions
            self._mask = None if self._lines else self._mask[..., :slots]
        self.noted = slots

    def pick(self, rows: torch.Tensor) -> None:
        """Goes on with these rows."""
        if self._ids:
            ids = torch.cat(self._ids, 1)
            places = rows.to(ids.device)
            if any(given is not None for given in self._positions):
                if not self.name():  # rare: positions are checked before they are mixed
                    return
            else:
                self._ids, self._positions = [ids.index_select(0, places)], [None]
        if self._mask is not None:
            self._mask = self._mask[rows.to(self._mask.device)]
        if not self._lines:
            return
        order, old = rows.tolist(), self._lines
        self._lines = [old[row] for row in order]
        self.pads = [self.pads[row] for row in order]
        kept = {id(line) for line in self._lines}
        for number, line in {id(line): line for line in old}.items():
            if number not in kept:
                line.session.close()

    def clear(self) -> None:
        """Forgets all."""
        for line in {id(line): line for line in self._lines}.values():
            line.session.close()
        self._lines, self.pads, self._ids, self._positions = [], [], [], []
        self.named = self.noted = 0
        self.blind, self._mask = "", None
