"""What the rows of a batch consist of: their tokens, as sessions of a namespace."""

from __future__ import annotations

from array import array
from typing import Any, List, Optional, Sequence, Tuple, Union

import torch
from kvtier import Namespace, Session

from ._errors import invalid

#: What a forward pass may be given beside ids, and KV still depends on the ids alone.
_HARMLESS = frozenset((
    "input_ids", "attention_mask", "position_ids", "cache_position", "labels", "logits_to_keep",
    "num_logits_to_keep", "past_key_values", "use_cache", "return_dict", "output_attentions",
    "output_hidden_states", "output_router_logits",
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


def _shown(mask: Any, rows: int, tokens: int) -> "Union[None, str, torch.Tensor]":
    """What a mask shows of so many slots: None for all, what is wrong with it, or of each row how
    many and the first (which does not wait for a GPU). Nothing of the mask itself is kept."""
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or mask.shape[0] != rows:
        return "the model was given an attention_mask that is not [batch, tokens]"
    if mask.shape[1] < tokens:  # what it does not reach is hidden
        return "the attention_mask does not reach the last token"
    mask = mask[:, :tokens]
    if mask.device.type == "cpu" and bool(mask.all()):
        return None
    shown = mask != 0
    return torch.stack([shown.sum(1), shown.to(torch.uint8).argmax(1)])


def _cut(end: int, mask: Any, slots: int) -> Tuple[int, Any]:
    """What a mask showed of the first of its slots: those that go are no padding."""
    if end > slots and isinstance(mask, torch.Tensor):
        mask = torch.stack([(mask[0] - (end - slots)).clamp(min=0), mask[1]])
    return min(end, slots), mask


class Line:
    """A session and its tokens."""

    __slots__ = ("session", "tokens")

    def __init__(self, session: Session, tokens: Sequence[int] = ()) -> None:
        self.session, self.tokens = session, array("I", tokens)


class Rows:
    """The rows of one cache. Ids are copied from forward passes (whose tensors may be written to
    afterwards), and read, which waits for a GPU, once a chunk is full. Two rows of a beam share a
    session until they differ."""

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
        #: That KV is known to depend on more than ids: nobody's word makes it theirs.
        self.barred = False
        self._ids: List[torch.Tensor] = []
        self._positions: List[Optional[torch.Tensor]] = []
        #: How many slots there were after each pass, and what its mask showed of them.
        self._masks: List[Tuple[int, Any]] = []

    @property
    def sessions(self) -> List[Session]:
        """One a row."""
        return [line.session for line in self._lines]

    def note(self, ids: Any, kwargs: Any) -> None:
        """A forward pass is about to begin."""
        if self.blind:
            return
        for name, value in kwargs.items():
            if value is not None and name not in _HARMLESS:
                self.blind = f"the model was given {name}, of which tokens say nothing"
                self.barred = name != "inputs_embeds"
                return
        if ids is None or ids.ndim != 2:
            self.blind = "the model was given no input_ids of [batch, tokens]"
            return
        if self._ids and self._ids[-1].shape[0] != ids.shape[0]:
            self.bar(f"{ids.shape[0]} rows after {self._ids[-1].shape[0]}")
            return
        positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
        self.noted += ids.shape[1]
        self._ids.append(ids.clone())
        self._positions.append(None if positions is None else positions.clone())
        self._masks.append((self.noted, None if mask is None
                            else _shown(mask, ids.shape[0], self.noted)))

    def bar(self, why: str) -> None:
        """KV depends on more than ids."""
        self.blind, self.barred = why, True

    def name(self) -> bool:
        """Has the sessions know all ids that were noted; False when something is unknown."""
        if self.blind or not self._ids:
            return not self.blind
        ids, why = self._checked()
        if why:
            self.bar(why)
            return False
        self._append(ids)
        return True

    def _checked(self) -> Tuple[List[List[int]], str]:
        """The ids that are new, a list a row, and what is wrong with the passes."""
        joined = torch.cat(self._ids, 1)
        if self._lines and joined.shape[0] != len(self._lines):
            return [], f"{joined.shape[0]} rows after {len(self._lines)}"
        pads, why = self._padding(joined.shape[0])
        if why:
            return [], why
        if not self._lines:
            self._open(pads)
        if not self._in_order(joined):
            return [], "position_ids do not count the tokens of each row from 0"
        return joined.tolist(), ""

    def _padding(self, rows: int) -> Tuple[List[int], str]:
        """The padding that the masks of all new passes agree on, and what is wrong with them."""
        wrong = next((mask for _, mask in self._masks if isinstance(mask, str)), "")
        if wrong:
            return [], wrong
        told = [mask for _, mask in self._masks if mask is not None]
        if not told and not any(self.pads):
            return [0] * rows, ""
        numbers = iter(torch.stack(told).tolist() if told else [])
        pads = list(self.pads) if self._lines else None
        known = [(n, next(numbers) if mask is not None else None) for n, mask in self._masks]
        for slots, mask in reversed(known):  # the last one tells most
            hidden = [0] * rows
            if mask is not None:
                hidden = [slots - shown for shown in mask[0]]
                if any(shown and first != pad for shown, first, pad in zip(*mask, hidden)):
                    return [], "an attention_mask with zeros behind ones"
            pads = hidden if pads is None else pads
            if hidden != [min(pad, slots) for pad in pads]:
                return [], "the attention_mask has changed"
        return pads or [0] * rows, ""

    def _in_order(self, joined: torch.Tensor) -> bool:
        """Whether positions are those that tokens have by themselves. A pass that was given none
        has its slots for positions, which is the same without padding alone."""
        if any(self.pads) and any(given is None for given in self._positions):
            return False
        if all(given is None for given in self._positions):
            return True
        if any(given is not None and given.ndim != 2 for given in self._positions):
            return False
        rows, slots = joined.shape
        want = torch.arange(self.named, self.named + slots) - torch.tensor(self.pads)[:, None]
        want = want.to(joined.device)
        have, at = [], 0
        for ids, given in zip(self._ids, self._positions):
            begin, at = at, at + ids.shape[1]
            have.append(want[:, begin:at] if given is None
                        else given.to(joined.device).expand(rows, ids.shape[1]))
        return bool(((torch.cat(have, 1) == want) | (want < 0)).all())

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
        self._ids, self._positions, self._masks = [], [], []

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
            self._ids, self._positions, self._masks = [], [], []
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
            begins = [self.named] + [end for end, _ in self._masks]
            self._masks = [_cut(end, mask, slots) for begin, (end, mask)
                           in zip(begins, self._masks) if begin < slots]
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
        self._masks = [(end, mask[:, rows.to(mask.device)] if isinstance(mask, torch.Tensor)
                        else mask) for end, mask in self._masks]
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
        """Forgets all, also where a session does not close."""
        lines = {id(line): line for line in self._lines}
        self._lines, self.pads, self._ids, self._positions = [], [], [], []
        self.named = self.noted = 0
        self.blind, self.barred, self._masks = "", False, []
        for line in lines.values():
            line.session.close()

    def fork(self) -> "Rows":
        """The same rows, of which each goes its own way."""
        other = Rows(self._space, self._tenant)
        lines = {id(line): Line(line.session.fork(tenant=self._tenant), line.tokens)
                 for line in self._lines}
        other._lines = [lines[id(line)] for line in self._lines]
        other.pads, other.named, other.noted = list(self.pads), self.named, self.noted
        other.blind, other.barred = self.blind, self.barred
        other._ids, other._positions = list(self._ids), list(self._positions)
        other._masks = list(self._masks)
        return other
