'use strict';

const { koffi, lib, make, C, TYPES } = require('./abi');
const { check } = require('./errors');

const bytesOf = (text) => Buffer.from(text, 'utf8');

/** An eviction policy for objects that the program keeps itself. Needs no runtime. Ids are numbers or
 *  BigInts; `now` is the program's monotonic clock in ns, or 0 in every call. */
class Policy {
  constructor(spec = 'lru', { capacity = 0, logEntries = 0, holes = false } = {}) {
    const text = bytesOf(spec);
    const err = [null];
    this.raw = [null];
    check('policy', lib.kvt_policy_open(make('kvt_policy_opts_t', { spec: text,
      spec_bytes: text.length, capacity_units: capacity, log_entries: logEntries,
      flags: holes ? C.KVT_POLICY_HOLES : 0 }), this.raw, err), err);
  }

  /** Inserts objects `{id, units, parent}`, all or none. */
  insert(objects, now = 0) {
    const rows = objects.map(({ id, units = 1, parent }) => make('kvt_policy_object_t', { id, units,
      parent: parent ?? 0, flags: parent === undefined ? 0 : C.KVT_OBJECT_HAS_PARENT }));
    const err = [null];
    check('insert', lib.kvt_policy_insert(this.raw[0], now, null, rows, rows.length,
      koffi.sizeof(TYPES.kvt_policy_object_t), err), err);
  }

  /** Looks up a path of objects and touches the hits; returns the number of hits before the first
   *  miss. */
  lookup(ids, now = 0) {
    const list = BigUint64Array.from(ids, BigInt);
    const out = [0];
    const err = [null];
    check('lookup', lib.kvt_policy_lookup(this.raw[0], now, null, list, list.length, null, out, err),
      err);
    return Number(out[0]);
  }

  /** Evicts objects until `units` are free, at most `most` victims. Returns the victims, and as `short`
   *  the units that are still missing, which is no error. */
  evict(units, { most = 1024, now = 0 } = {}) {
    const size = koffi.sizeof(TYPES.kvt_policy_victim_t);
    const rows = Buffer.alloc(size * Math.max(most, 1));
    const out = make('kvt_policy_outcome_t');
    const err = [null];
    check('evict', lib.kvt_policy_evict(this.raw[0], now, units, rows, most, size, out, err), err);
    const victims = [];
    for (let i = 0; i < Number(out.victims); i++) {
      victims.push(koffi.decode(rows, i * size, 'kvt_policy_victim_t'));
    }
    return { victims, short: Number(out.shortfall_units) };
  }

  /** Switches to another policy, which takes over the objects. */
  switchTo(spec) {
    const text = bytesOf(spec);
    const err = [null];
    check('switch', lib.kvt_policy_switch(this.raw[0], text, text.length, err), err);
  }

  /** The policy's spec in canonical form. */
  get spec() {
    const to = Buffer.alloc(8192); // longer than any spec
    const bytes = [0];
    check('spec', lib.kvt_policy_spec(this.raw[0], to, to.length, bytes));
    return to.toString('utf8', 0, Number(bytes[0]));
  }

  close() { check('policy close', lib.kvt_policy_close(this.raw)); }
}

module.exports = { Policy };
