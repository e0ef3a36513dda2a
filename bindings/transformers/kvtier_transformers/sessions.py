"""Tokens of a batch's rows: recorded from forward passes, kept as sessions of a namespace."""

from __future__ import annotations

from array import array
from typing import Any, List, Optional, Sequence, Tuple, Union

import torch
from kvtier import Namespace, Session

from ._errors import invalid

#: Arguments of a forward pass with which KV still depends on the ids only.
_ALLOWED = frozenset((
    "input_ids", "attention_mask", "position_ids", "cache_position", "labels", "logits_to_keep",
    "num_logits_to_keep", "past_key_values", "use_cache", "return_dict", "output_attentions",
    "output_hidden_states", "output_router_logits",
))


def as_rows(tokens: Any) -> List[List[int]]:
    """Returns token ids as one list per row.

    Accepts a tensor or an array of one or two dimensions, a list, or a list of lists."""
    if isinstance(tokens, torch.Tensor) or hasattr(tokens, "tolist"):
        tokens = tokens.tolist()
    rows = list(tokens)
    if not rows or not isinstance(rows[0], (list, tuple)):
        rows = [rows]
    rows = [[int(token) for token in row] for row in rows]
    if len({len(row) for row in rows}) != 1:
        raise invalid(f"rows have different lengths {sorted({len(row) for row in rows})}: pad them "
                      "on the left, and pass attention_mask=")
    if any(not 0 <= token < 1 << 32 for row in rows for token in row):
        raise invalid("a token id is out of range: ids are integers from 0 to 2**32 - 1")
    return rows


def pads_of(mask: Any, rows: int, tokens: int) -> List[int]:
    """Returns the slots of left padding of each row. Raises for any other mask."""
    if mask is None:
        return [0] * rows
    given = torch.as_tensor(mask)
    if given.ndim == 1:
        given = given.unsqueeze(0)
    if given.ndim != 2 or given.shape[0] != rows or given.shape[1] < tokens:
        raise invalid(f"attention_mask has shape {list(given.shape)}: it must have {rows} rows of "
                      f"at least {tokens} tokens")
    ones = given[:, :tokens].bool()
    pads = [tokens - int(n) for n in ones.sum(1)]
    for row, pad in zip(ones, pads):
        if not bool(row[pad:].all()):
            raise invalid("attention_mask has zeros after ones: pad on the left, other padding "
                          "cannot be stored")
    return pads


def _mask_summary(mask: Any, rows: int, tokens: int) -> "Union[None, str, torch.Tensor]":
    """Summarises a mask over `tokens` slots, without a reference to the mask.

    Returns None if it shows all slots, a text that says why it is rejected, or a tensor with the
    number of shown slots and the first shown slot of each row. Does not wait for a GPU."""
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or mask.shape[0] != rows:
        return "the model received an attention_mask that is not [batch, tokens]"
    if mask.shape[1] < tokens:  # slots beyond the mask are hidden
        return "the attention_mask is shorter than the tokens"
    mask = mask[:, :tokens]
    if mask.device.type == "cpu" and bool(mask.all()):
        return None
    shown = mask != 0
    return torch.stack([shown.sum(1), shown.to(torch.uint8).argmax(1)])


def _truncate_summary(end: int, mask: Any, slots: int) -> Tuple[int, Any]:
    """Truncates a mask summary of `end` slots to `slots`. The removed slots are not padding."""
    if end > slots and isinstance(mask, torch.Tensor):
        mask = torch.stack([(mask[0] - (end - slots)).clamp(min=0), mask[1]])
    return min(end, slots), mask


class RowSession:
    """A session with its tokens. Beams share one until they differ."""

    __slots__ = ("session", "tokens")

    def __init__(self, session: Session, tokens: Sequence[int] = ()) -> None:
        self.session, self.tokens = session, array("I", tokens)


class Rows:
    """The rows of one cache.

    `record` copies the ids of each forward pass, because the caller may reuse their tensor.
    `append_recorded` reads them once a chunk is full; that waits for a GPU."""

    def __init__(self, namespace: Namespace, tenant: int = 0) -> None:
        self._namespace, self._tenant = namespace, tenant
        self._row_sessions: List[RowSession] = []
        #: Slots of left padding of each row.
        self.pads: List[int] = []
        #: Slots, including padding, whose ids the sessions have.
        self.appended = 0
        #: Slots, including padding, whose ids were recorded.
        self.recorded = 0
        #: Why the ids are unknown; "" if they are known. While unknown, nothing is stored.
        self.unknown = ""
        #: Whether KV depends on more than ids: ids from the caller cannot help then.
        self.rejected = False
        self._ids: List[torch.Tensor] = []
        self._positions: List[Optional[torch.Tensor]] = []
        #: For each recorded pass, the slots after it and its mask summary.
        self._masks: List[Tuple[int, Any]] = []

    @property
    def sessions(self) -> List[Session]:
        """The session of each row."""
        return [line.session for line in self._row_sessions]

    def record(self, ids: Any, kwargs: Any) -> None:
        """Records a forward pass before it runs."""
        if self.unknown:
            return
        for name, value in kwargs.items():
            if value is not None and name not in _ALLOWED:
                self.unknown = f"the model received {name}, which token ids do not cover"
                self.rejected = name != "inputs_embeds"
                return
        if ids is None or ids.ndim != 2:
            self.unknown = "the model received no input_ids of [batch, tokens]"
            return
        if self._ids and self._ids[-1].shape[0] != ids.shape[0]:
            self.reject(f"a pass had {ids.shape[0]} rows after one with {self._ids[-1].shape[0]}")
            return
        positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
        self.recorded += ids.shape[1]
        self._ids.append(ids.clone())
        self._positions.append(None if positions is None else positions.clone())
        self._masks.append((self.recorded, None if mask is None
                            else _mask_summary(mask, ids.shape[0], self.recorded)))

    def reject(self, why: str) -> None:
        """Marks the KV as dependent on more than ids."""
        self.unknown, self.rejected = why, True

    def append_recorded(self) -> bool:
        """Appends all recorded ids to the sessions. Returns False if the ids are unknown."""
        if self.unknown or not self._ids:
            return not self.unknown
        ids, why = self._validate()
        if why:
            self.reject(why)
            return False
        self._append(ids)
        return True

    def _validate(self) -> Tuple[List[List[int]], str]:
        """Checks the recorded passes. Returns one list of new ids per row, and why they are
        rejected or ""."""
        joined = torch.cat(self._ids, 1)
        if self._row_sessions and joined.shape[0] != len(self._row_sessions):
            return [], f"a pass had {joined.shape[0]} rows after one with {len(self._row_sessions)}"
        pads, why = self._padding(joined.shape[0])
        if why:
            return [], why
        if not self._row_sessions:
            self._open(pads)
        if not self._positions_match(joined):
            return [], "position_ids do not count the tokens of each row from 0"
        return joined.tolist(), ""

    def _padding(self, rows: int) -> Tuple[List[int], str]:
        """Returns the padding on which the masks of all recorded passes agree, and why the masks
        are rejected or ""."""
        reason = next((mask for _, mask in self._masks if isinstance(mask, str)), "")
        if reason:
            return [], reason
        given = [mask for _, mask in self._masks if mask is not None]
        if not given and not any(self.pads):
            return [0] * rows, ""
        numbers = iter(torch.stack(given).tolist() if given else [])
        pads = list(self.pads) if self._row_sessions else None
        known = [(n, next(numbers) if mask is not None else None) for n, mask in self._masks]
        for slots, mask in reversed(known):  # the last mask covers the most slots
            hidden = [0] * rows
            if mask is not None:
                hidden = [slots - shown for shown in mask[0]]
                if any(shown and first != pad for shown, first, pad in zip(*mask, hidden)):
                    return [], "the attention_mask has zeros after ones"
            pads = hidden if pads is None else pads
            if hidden != [min(pad, slots) for pad in pads]:
                return [], "the attention_mask changed between passes"
        return pads or [0] * rows, ""

    def _positions_match(self, joined: torch.Tensor) -> bool:
        """Whether positions count each row's tokens from 0. A pass without positions uses its slot
        numbers, which agree only without padding."""
        if any(self.pads) and any(given is None for given in self._positions):
            return False
        if all(given is None for given in self._positions):
            return True
        if any(given is not None and given.ndim != 2 for given in self._positions):
            return False
        rows, slots = joined.shape
        want = torch.arange(self.appended, self.appended + slots) - torch.tensor(self.pads)[:, None]
        want = want.to(joined.device)
        have, at = [], 0
        for ids, given in zip(self._ids, self._positions):
            begin, at = at, at + ids.shape[1]
            have.append(want[:, begin:at] if given is None
                        else given.to(joined.device).expand(rows, ids.shape[1]))
        return bool(((torch.cat(have, 1) == want) | (want < 0)).all())

    def _open(self, pads: Sequence[int]) -> None:
        self.pads = list(pads)
        self._row_sessions = [RowSession(self._namespace.session(tenant=self._tenant))
                              for _ in self.pads]

    def _append(self, ids: List[List[int]]) -> None:
        """Appends ids for the slots after `appended`."""
        seen = set()
        for at, line in enumerate(self._row_sessions):  # fork before a shared session changes
            if id(line) in seen:
                fork = line.session.fork(tenant=self._tenant)
                self._row_sessions[at] = line = RowSession(fork, line.tokens)
            seen.add(id(line))
        for line, pad, row in zip(self._row_sessions, self.pads, ids):
            real = array("I", row[max(0, pad - self.appended):])
            if real:
                line.session.append(real)
                line.tokens.extend(real)
        self.appended += len(ids[0])
        self._ids, self._positions, self._masks = [], [], []

    def assign(self, ids: List[List[int]], pads: Sequence[int]) -> None:
        """Replaces all rows by these ids."""
        self.clear()
        self._open(pads)
        self._append(ids)
        self.recorded = self.appended

    def token_count(self, row: int) -> int:
        """Returns the number of tokens in a row's session, without padding."""
        return max(0, self.appended - self.pads[row])

    def starts_with(self, row: int, tokens: Sequence[int]) -> bool:
        """Whether a row starts with these tokens."""
        return self._row_sessions[row].tokens[:len(tokens)] == array("I", tokens)

    def truncate(self, slots: int) -> None:
        """Truncates all rows to `slots` slots, including padding."""
        if slots >= self.recorded:
            return
        if slots < self.appended:
            self._ids, self._positions, self._masks = [], [], []
            for line, pad in zip(self._row_sessions, self.pads):
                remaining = max(0, slots - pad)
                if len(line.tokens) > remaining:  # a shared session is truncated once
                    line.session.truncate(remaining)
                    del line.tokens[remaining:]
            self.appended = slots
        else:
            left, at = [], self.appended
            for ids, given in zip(self._ids, self._positions):
                n = min(ids.shape[1], slots - at)
                if n > 0:
                    left.append((ids[:, :n], None if given is None else given[..., :n]))
                at += ids.shape[1]
            self._ids, self._positions = [a for a, _ in left], [b for _, b in left]
            begins = [self.appended] + [end for end, _ in self._masks]
            self._masks = [_truncate_summary(end, mask, slots) for begin, (end, mask)
                           in zip(begins, self._masks) if begin < slots]
        self.recorded = slots

    def select(self, rows: torch.Tensor) -> None:
        """Selects and reorders rows; an index may occur several times."""
        if self._ids:
            ids = torch.cat(self._ids, 1)
            indices = rows.to(ids.device)
            if any(given is not None for given in self._positions):
                if not self.append_recorded():  # rare: check positions before rows are reordered
                    return
            else:
                self._ids, self._positions = [ids.index_select(0, indices)], [None]
        self._masks = [(end, mask[:, rows.to(mask.device)] if isinstance(mask, torch.Tensor)
                        else mask) for end, mask in self._masks]
        if not self._row_sessions:
            return
        order, old = rows.tolist(), self._row_sessions
        self._row_sessions = [old[row] for row in order]
        self.pads = [self.pads[row] for row in order]
        kept = {id(line) for line in self._row_sessions}
        for number, line in {id(line): line for line in old}.items():
            if number not in kept:
                line.session.close()

    def clear(self) -> None:
        """Removes all rows, even if closing a session fails."""
        lines = {id(line): line for line in self._row_sessions}
        self._row_sessions, self.pads, self._ids, self._positions = [], [], [], []
        self.appended = self.recorded = 0
        self.unknown, self.rejected, self._masks = "", False, []
        for line in lines.values():
            line.session.close()

    def fork(self) -> "Rows":
        """Returns a copy that is independent of this one."""
        other = Rows(self._namespace, self._tenant)
        lines = {id(line): RowSession(line.session.fork(tenant=self._tenant), line.tokens)
                 for line in self._row_sessions}
        other._row_sessions = [lines[id(line)] for line in self._row_sessions]
        other.pads, other.appended, other.recorded = list(self.pads), self.appended, self.recorded
        other.unknown, other.rejected = self.unknown, self.rejected
        other._ids, other._positions = list(self._ids), list(self._positions)
        other._masks = list(self._masks)
        return other
