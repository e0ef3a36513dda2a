'use strict';
// Declarations of the C interface for koffi, from its description, kvtier.json. Handles are numbers, not
// addresses; koffi represents a `void *` as a BigInt, which suits them. A test compares every struct
// with the layout of a C compiler.

const fs = require('node:fs');
const path = require('node:path');
const koffi = require('koffi');

/** The description: beside this file in a package, else in the source tree. */
const description = [path.join(__dirname, 'kvtier.json'),
  path.join(__dirname, '../../include/kvtier/kvtier.json')].find((file) => fs.existsSync(file));
if (!description) {
  throw new Error(`kvtier.json is missing: copy include/kvtier/kvtier.json to ${__dirname}`);
}
const items = JSON.parse(fs.readFileSync(description, 'utf8')).headers.flatMap(({ items: of }) => of);
const ofKind = (kind) => items.filter((item) => item.kind === kind);

/** The constants that are safe integers. @type {Object<string, number>} */
const C = {};
for (const { name, value } of ofKind('constant')) {
  const number = Number(value.replace(/[uUlL]+$/, ''));
  if (Number.isSafeInteger(number)) C[name] = number;
}

const aliases = new Map(ofKind('alias').map(({ name, type }) => [name, type]));
const structs = new Map(ofKind('struct').map((struct) => [struct.name, struct]));
/** The structs, as koffi types by name. */
const TYPES = {};

/** The koffi type of a number; undefined for structs, handles, callbacks and void. */
function scalarOf(type) {
  const name = aliases.get(type) ?? type;
  return structs.has(name) || name === 'void' || !(name in koffi.types) ? undefined : name;
}

/** The koffi type of a field. Pointers to anything but structs are addresses. */
function fieldType({ type, pointers = 0, length }) {
  const struct = structs.has(type) ? declare(structs.get(type)) : undefined;
  const value = struct ?? scalarOf(type) ?? 'void *'; // callbacks are pointers
  if (pointers > 0) return pointers === 1 && struct ? koffi.pointer(struct) : 'void *';
  return length === undefined ? value : koffi.array(value, length);
}

/** Declares a struct, after those that it uses. */
function declare({ name, fields }) {
  TYPES[name] ??= koffi.struct(name, Object.fromEntries(
    fields.map((field) => [field.name, fieldType(field)])));
  return TYPES[name];
}
structs.forEach(declare);

/** The empty value of a field. */
function empty({ type, pointers = 0, length }) {
  if (pointers > 0) return null;
  if (structs.has(type)) return make(type);
  const zero = scalarOf(type) ? 0 : null;
  return length === undefined ? zero : Array(length).fill(zero);
}

/** A struct with the given values; other fields are zero, struct_size is set. */
function make(name, values = {}) {
  const { fields, sized } = structs.get(name);
  const value = Object.fromEntries(fields.map((field) => [
    field.name, field.name in values ? values[field.name] : empty(field)]));
  if (sized) value.struct_size = koffi.sizeof(TYPES[name]);
  return value;
}

/** The koffi type of a parameter. Arrays that a call fills are buffers of the caller, also of bytes. */
function paramType({ name, type, pointers = 0, const: isConst = false }) {
  const struct = structs.get(type);
  if (pointers === 0) return scalarOf(type) ?? 'void *';
  if (pointers === 2) return '_Inout_ void **';
  if (struct && (isConst || struct.sized)) return `${isConst ? '' : '_Inout_ '}${type} *`;
  const number = scalarOf(type);
  const isOut = !isConst && name.startsWith('out_') && number && number !== 'uint8_t';
  return isOut ? `_Out_ ${number} *` : 'void *';
}

/** The library at the path in KVTIER_LIBRARY, else the one that the loader finds. */
const shared = koffi.load(process.env.KVTIER_LIBRARY || 'libkvtier.so.0.1');
const lib = {};
for (const { name, returns, params } of ofKind('function')) {
  const result = returns.pointers ? 'const char *' : scalarOf(returns.type);
  const list = params.map((param) => `${paramType(param)} ${param.name}`).join(', ');
  lib[name] = shared.func(`${result} ${name}(${list})`);
}

module.exports = { koffi, lib, make, C, TYPES };
