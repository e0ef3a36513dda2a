'use strict';

const { koffi, lib, make } = require('./abi');

/** What failing calls throw: `status` (negative), `code` such as 'KVT_E_BUSY', `offset` in a spec. */
class KvtError extends Error {
  constructor(call, status, words = {}) {
    super(`${call}: ${words.message || lib.kvt_status_str(status)}`);
    this.name = 'KvtError';
    this.status = status;
    this.code = lib.kvt_status_name(status);
    this.offset = words.offset ?? -1;
    this.errno = words.errno ?? 0;
  }
}

/** The words of a C error, which is freed. */
function wordsOf(raw) {
  if (raw[0] === null || raw[0] === 0n) return {};
  const info = make('kvt_error_info_t');
  lib.kvt_error_info(raw[0], info);
  const words = {
    message: koffi.decode(info.message, 'char', Number(info.message_bytes)),
    offset: Number.isSafeInteger(Number(info.offset)) ? Number(info.offset) : -1,
    errno: info.os_errno,
  };
  if (Array.isArray(words.message)) words.message = String.fromCharCode(...words.message);
  lib.kvt_error_free(raw);
  return words;
}

function check(call, status, err = [null]) {
  if (status !== 0) throw new KvtError(call, status, wordsOf(err));
}

function invalid(call, message) {
  return new KvtError(call, -1, { message });
}

module.exports = { KvtError, check, invalid, wordsOf };
