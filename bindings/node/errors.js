'use strict';

const { koffi, lib, make, C } = require('./abi');

/** The error that failing calls throw: `status` (negative), `code` such as 'KVT_E_BUSY', `offset` in a
 *  spec (-1 = none), `errno` (0 = none). */
class KvtError extends Error {
  constructor(call, status, details = {}) {
    super(`${call}: ${details.message || lib.kvt_status_str(status)}`);
    this.name = 'KvtError';
    this.status = status;
    this.code = lib.kvt_status_name(status);
    this.offset = details.offset ?? -1;
    this.errno = details.errno ?? 0;
  }
}

/** The contents of a C error, which it frees. */
function takeDetails(raw) {
  if (raw[0] === null || raw[0] === 0n) return {};
  const info = make('kvt_error_info_t');
  lib.kvt_error_info(raw[0], info);
  const details = {
    message: koffi.decode(info.message, 'char', Number(info.message_bytes)),
    offset: Number.isSafeInteger(Number(info.offset)) ? Number(info.offset) : -1,
    errno: info.os_errno,
  };
  if (Array.isArray(details.message)) details.message = String.fromCharCode(...details.message);
  lib.kvt_error_free(raw);
  return details;
}

/** Throws if a C call failed. */
function check(call, status, err = [null]) {
  if (status !== 0) throw new KvtError(call, status, takeDetails(err));
}

/** The error for arguments that the binding rejects itself. */
function invalid(call, message) {
  return new KvtError(call, C.KVT_E_INVALID, { message });
}

module.exports = { KvtError, check, invalid, takeDetails };
