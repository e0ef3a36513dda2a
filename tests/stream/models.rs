//! Model files, valid and invalid: what is parsed, how tensors are grouped into units, and that
//! images of units have the bytes of the tensors.

use kvtier_testkit::fixtures::model_files as files;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::Path;

use files::{Made, Meta, Sizes, gguf_head, safetensors_head};
use files::{write_gguf, write_safetensors};
use kvtier::base::status::{Error, Result, Status};
use kvtier::stream::model::{Facts, File, Format, Model, Stop, Tensor};
use kvtier::stream::units::{ALIGN_BYTES, Entry, Extent, Index, NONE, Range, Role, Units};
use kvtier_testkit::fixtures::scratch::Scratch;
use proptest::prelude::*;

/// Notes the largest piece of memory that this thread takes.
struct Watching;

thread_local! {
    static LARGEST: Cell<usize> = const { Cell::new(0) };
}

fn note(bytes: usize) {
    // None is left where the thread ends.
    let _ = LARGEST.try_with(|largest| largest.set(largest.get().max(bytes)));
}

// SAFETY: passes everything on to the system's allocator.
unsafe impl GlobalAlloc for Watching {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note(size);
        // SAFETY: the caller's promise.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Watching = Watching;

/// Result of `work`, and the largest allocation that it made.
fn largest<T>(work: impl FnOnce() -> T) -> (T, usize) {
    LARGEST.set(0);
    let out = work();
    (out, LARGEST.get())
}

fn file(bytes: u64) -> File {
    File { path: "x".into(), bytes }
}

fn parse_gguf(head: &[u8], bytes: u64) -> Result<Model> {
    Model::of_gguf(file(bytes), head).map_err(|stop| match stop {
        Stop::Bad(error) => error,
        Stop::More(needed) => Error::new(Status::Again, format!("{needed} bytes are needed")),
    })
}

/// Checks the invariants of an accepted model.
fn sound(model: &Model) {
    let mut names: Vec<_> = model.tensors.iter().map(|tensor| &tensor.name).collect();
    names.sort();
    assert!(names.windows(2).all(|pair| pair[0] != pair[1]));
    let mut ends = BTreeMap::new();
    let mut last = (0, 0);
    for tensor in &model.tensors {
        assert!((tensor.file, tensor.offset) >= last, "{tensor:?}");
        last = (tensor.file, tensor.offset);
        let file = &model.files[tensor.file as usize];
        assert!(tensor.offset.checked_add(tensor.bytes).expect("a place") <= file.bytes);
        let end = ends.entry(tensor.file).or_insert(0);
        assert!(tensor.bytes == 0 || tensor.offset >= *end, "{tensor:?} overlaps");
        *end = (*end).max(tensor.offset + tensor.bytes);
    }
}

/// Checks the units of a model against a slow search.
fn grouped(units: &Units, model: &Model, chunk: u64) {
    let mut seen: BTreeMap<u32, Vec<(u64, u64)>> = BTreeMap::new();
    for part in &units.parts {
        seen.entry(part.tensor).or_default().push((part.from, part.bytes));
        let (unit, tensor) =
            (&units.units[part.unit as usize], &model.tensors[part.tensor as usize]);
        let offset = tensor.offset + part.from;
        let holds = |e: &&Extent| {
            (e.file, e.at + (offset - e.offset.min(offset))) == (tensor.file, part.at)
                && e.offset <= offset
                && offset + part.bytes <= e.offset + e.bytes
        };
        assert_eq!(unit.extents.iter().filter(holds).count(), 1, "{part:?} {unit:?}");
    }
    for (number, tensor) in model.tensors.iter().enumerate() {
        let mut parts = seen.remove(&(number as u32)).unwrap_or_default();
        parts.sort();
        let end = parts.iter().fold(0, |end, (from, bytes)| {
            assert_eq!(*from, end, "{tensor:?}");
            end + bytes
        });
        assert_eq!(end, tensor.bytes);
    }
    assert!(seen.is_empty());
    for unit in &units.units {
        let mut image = vec![0u8; (unit.image_bytes / ALIGN_BYTES) as usize];
        let mut covered = 0;
        for piece in unit.chunks(chunk) {
            let extent = &unit.extents[piece.extent as usize];
            assert_eq!(piece.file, extent.file);
            for n in [piece.read_offset, piece.read_bytes, piece.read_at] {
                assert_eq!(n % ALIGN_BYTES, 0);
            }
            let slack = piece.offset - piece.read_offset;
            assert_eq!(piece.at - piece.read_at, slack);
            assert!(piece.bytes > 0 && slack < ALIGN_BYTES);
            assert!(piece.read_bytes - slack - piece.bytes < ALIGN_BYTES);
            assert_eq!(piece.at - extent.at, piece.offset - extent.offset);
            covered += piece.bytes;
            let first = (piece.read_at / ALIGN_BYTES) as usize;
            for grain in &mut image[first..first + (piece.read_bytes / ALIGN_BYTES) as usize] {
                *grain += 1;
            }
        }
        assert_eq!(covered, unit.extents.iter().map(|extent| extent.bytes).sum::<u64>());
        assert!(image.iter().all(|times| *times == 1), "{unit:?}: every grain is read once");
        assert_eq!(unit.chunks(chunk).count() as u64, unit.chunk_count(chunk));
    }
}

/// Reads units as they say, and compares with what was written.
fn has_bytes(model: &Model, units: &Units, made: &[Made], chunk: u64) {
    let files: Vec<_> =
        model.files.iter().map(|file| std::fs::read(&file.path).expect("there")).collect();
    let made: BTreeMap<_, _> = made.iter().map(|made| (made.name.as_str(), made)).collect();
    let mut images = Vec::new();
    for unit in &units.units {
        let mut image = vec![0u8; unit.image_bytes as usize];
        for piece in unit.chunks(chunk) {
            let file = &files[piece.file as usize];
            let from = piece.read_offset as usize;
            let to = (from + piece.read_bytes as usize).min(file.len());
            image[piece.read_at as usize..][..to - from].copy_from_slice(&file[from..to]);
        }
        images.push(image);
    }
    for part in &units.parts {
        let made = made[model.tensors[part.tensor as usize].name.as_str()];
        let mut expected = vec![0; part.bytes as usize];
        made.fill(part.from, &mut expected);
        let found = &images[part.unit as usize][part.at as usize..][..part.bytes as usize];
        assert!(found == expected, "{} at {}", made.name, part.from);
    }
}

fn compare(model: &Model, made: &[Made]) {
    sound(model);
    assert_eq!(model.tensors.len(), made.len());
    assert_eq!(model.bytes(), made.iter().map(Made::bytes).sum::<u64>());
    for made in made {
        let found = model.tensors.iter().find(|tensor| tensor.name == made.name);
        let found = found.unwrap_or_else(|| panic!("{} is not there", made.name));
        assert_eq!((found.dtype, &found.dims, found.bytes), (made.dtype, &made.dims, made.bytes()));
    }
}

fn facts_of(sizes: &Sizes) -> Facts {
    let of = |n: u64| n as u32;
    Facts {
        architecture: "llama".into(),
        layers: of(sizes.layers),
        hidden: of(sizes.hidden),
        heads: of(sizes.heads),
        kv_heads: of(sizes.kv_heads),
        key_dim: of(sizes.hidden / sizes.heads),
        value_dim: of(sizes.hidden / sizes.heads),
        context: of(sizes.context),
        vocabulary: of(sizes.vocabulary),
        experts: of(sizes.experts),
        experts_used: of(sizes.experts.min(2)),
        ..Facts::default()
    }
}

/// Names of the units that a model of these sizes has.
fn expected_units(sizes: &Sizes, other: bool) -> Vec<String> {
    let mut names = vec!["embedding".to_string()];
    names.extend(other.then(|| "other rope_freqs".into()));
    for layer in 0..sizes.layers {
        names.push(format!("layer {layer}"));
        names.extend((0..sizes.experts).map(|e| format!("layer {layer} expert {e}")));
    }
    names.extend(["norm".into(), "head".into()]);
    names
}

fn check_units(model: &Model, sizes: &Sizes, made: &[Made], other: bool, chunk: u64) {
    let units = Units::of(model).expect("groups");
    let names: Vec<_> = units.units.iter().map(|unit| unit.name.clone()).collect();
    assert_eq!(names, expected_units(sizes, other));
    units.check(model).expect("sound");
    grouped(&units, model, chunk);
    has_bytes(model, &units, made, chunk);
    let index = Index::new(&units).expect("memory");
    for layer in 0..sizes.layers as u32 + 1 {
        assert_eq!(index.layer(layer), units.layer(layer));
        assert_eq!(units.layer(layer), units.find(&format!("layer {layer}")));
        for expert in 0..sizes.experts as u32 + 1 {
            assert_eq!(index.expert(layer, expert), units.expert(layer, expert));
            let name = format!("layer {layer} expert {expert}");
            assert_eq!(units.expert(layer, expert), units.find(&name));
        }
    }
    for tensor in 0..model.tensors.len() as u32 + 1 {
        let mut parts: Vec<_> = units.part(tensor).copied().collect();
        parts.sort_by_key(|part| part.from);
        assert_eq!(index.parts(tensor), parts);
    }
}

fn sizes() -> impl Strategy<Value = Sizes> {
    let dtype = prop_oneof![Just("F16"), Just("BF16"), Just("F32")];
    let numbers = (1u64..4, 0u64..6, 1u64..5, 1u64..5, 1u64..200, any::<u64>());
    (numbers, dtype).prop_map(|((layers, experts, hidden, ffn, vocabulary, seed), dtype)| {
        let (hidden, ffn) = (hidden * 16, ffn * 24);
        Sizes { layers, experts, hidden, ffn, vocabulary, seed, dtype, ..Sizes::default() }
    })
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 48, failure_persistence: None, ..ProptestConfig::default()
    })]

    #[test]
    fn written_models_are_parsed_back(
        sizes in sizes(), files in 1usize..5, stacked: bool, chunk in 1u64..20_000, align in 0u32..8,
    ) {
        let scratch = Scratch::created("models-written");
        let made = sizes.gguf();
        let mut meta = sizes.metadata();
        if align > 0 {
            meta.push(("general.alignment".into(), Meta::U32(8 << align)));
        }
        let paths = write_gguf(&scratch.0, "some-model", &made, &meta, files);
        let any = &paths[sizes.seed as usize % paths.len()];
        let model = Model::open(std::slice::from_ref(any)).expect("sound");
        prop_assert_eq!(model.format, Format::Gguf);
        compare(&model, &made);
        prop_assert_eq!(&model.facts, &facts_of(&sizes));
        check_units(&model, &sizes, &made, true, chunk);
        let mut turned = paths.clone();
        turned.reverse();
        prop_assert!(Model::open(&turned).expect("sound") == model);
        prop_assert!(Model::open(std::slice::from_ref(&scratch.0)).expect("sound") == model);

        let scratch = Scratch::created("models-written-too");
        let made = sizes.safetensors(stacked);
        let path = write_safetensors(&scratch.0, &made, &sizes.config(), files);
        let model = Model::open(&[path]).expect("sound");
        prop_assert_eq!(model.format, Format::Safetensors);
        compare(&model, &made);
        prop_assert_eq!(&model.facts, &facts_of(&sizes));
        check_units(&model, &sizes, &made, false, chunk);
        prop_assert!(Model::open(std::slice::from_ref(&scratch.0)).expect("sound") == model);
    }

    #[test]
    fn random_unit_tables_are_rejected_or_sound(
        ranges in prop::collection::vec((0u32..3, 0u64..60_000, 0u64..20_000, 0usize..5), 1..20),
        chunk in 1u64..20_000,
    ) {
        let scratch = Scratch::created("models-table");
        let paths: Vec<_> = (0..2).map(|n| scratch.0.join(n.to_string())).collect();
        for (path, bytes) in paths.iter().zip([50_000, 70_000]) {
            std::fs::write(path, vec![0; bytes]).expect("written");
        }
        let mut entries: Vec<Entry> = Vec::new();
        for (file, offset, bytes, unit) in &ranges {
            let name = format!("unit {unit}");
            let range = Range { file: *file, offset: *offset, bytes: *bytes };
            match entries.iter_mut().find(|entry| entry.name == name) {
                Some(entry) => entry.ranges.push(range),
                None => entries.push(Entry {
                    name, role: Role::Other, layer: NONE, expert: NONE, ranges: vec![range],
                }),
            }
        }
        let mut all: Vec<_> = ranges.iter().map(|(f, o, b, _)| (*f, *o, *o + *b)).collect();
        all.sort_unstable();
        let inside = |(file, from, to): &(u32, u64, u64)| {
            from < to && *file < 2 && *to <= [50_000, 70_000][*file as usize]
        };
        let apart = all.windows(2).all(|p| p[0].0 < p[1].0 || p[0].2 <= p[1].1);
        match Units::table(&paths, entries.clone()) {
            Ok((model, units)) => {
                prop_assert!(all.iter().all(inside) && apart);
                sound(&model);
                grouped(&units, &model, chunk);
                let names = units.units.iter().map(|unit| &unit.name);
                prop_assert!(names.eq(entries.iter().map(|entry| &entry.name)));
            }
            Err(error) => {
                prop_assert!(!(all.iter().all(inside) && apart), "{}", error);
                prop_assert_eq!(error.status(), Status::Invalid, "{}", error);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 2000, failure_persistence: None, ..ProptestConfig::default()
    })]

    #[test]
    fn damaged_headers_are_rejected_or_sound(
        sizes in sizes(),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0u8..3), 1..8),
        cut in any::<prop::sample::Index>(), whole in 0u8..4,
    ) {
        let sizes = Sizes { layers: 1, vocabulary: sizes.vocabulary.min(9), ..sizes };
        let head = gguf_head(&sizes.gguf(), &sizes.metadata());
        let data: u64 = sizes.gguf().iter().map(|made| made.bytes().next_multiple_of(32)).sum();
        let mut bytes = hurt(&head, &damage);
        let file_bytes = head.len() as u64 + data;
        // The bytes read so far may be a part of the header, and the file may be truncated.
        let (read, there) = match whole {
            0 => (cut.index(bytes.len()), file_bytes),
            1 => (bytes.len(), cut.index(file_bytes as usize) as u64),
            _ => (bytes.len(), file_bytes),
        };
        bytes.truncate(read.min(there as usize));
        let (parsed, memory) = largest(|| parse_gguf(&bytes, there));
        prop_assert!(memory as u64 <= 8 * there + 4096, "{} bytes at once", memory);
        check_parsed(parsed, bytes.len() as u64, there);

        let made = sizes.safetensors(true);
        let head = safetensors_head(&made);
        let data: u64 = made.iter().map(Made::bytes).sum();
        let bytes = hurt(&head[8..], &damage);
        let there = match whole {
            0 => cut.index(head.len() + data as usize) as u64,
            _ => head.len() as u64 + data,
        };
        let (parsed, memory) = largest(|| Model::of_safetensors(file(there), &bytes));
        prop_assert!(memory as u64 <= 8 * head.len() as u64 + 4096, "{} bytes at once", memory);
        check_parsed(parsed, 0, 0);
    }
}

fn hurt(bytes: &[u8], damage: &[(prop::sample::Index, u8, u8)]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for (place, byte, how) in damage {
        let at = place.index(bytes.len());
        match how {
            0 => bytes[at] = *byte,
            1 => bytes[at] ^= 1 << (byte % 8),
            _ => {
                let end = (at + 8).min(bytes.len());
                bytes[at..end].fill(if byte % 2 == 0 { 0xFF } else { 0 });
            }
        }
    }
    bytes
}

fn check_parsed(parsed: Result<Model>, read: u64, there: u64) {
    match parsed {
        Ok(model) => {
            sound(&model);
            let units = Units::of(&model).expect("few enough");
            grouped(&units, &model, 8192);
        }
        Err(error) => {
            assert!(!error.message().is_empty());
            let fits = match error.status() {
                Status::Again => read < there,
                status => matches!(status, Status::Corrupt | Status::Unsupported | Status::Limit),
            };
            assert!(fits, "{error}");
        }
    }
}

/// A GGUF file as bytes: counts, metadata, names of tensors and data, whatever they are.
fn gguf(version: u32, tensors: u64, pairs: u64, rest: &[&[u8]]) -> Vec<u8> {
    let mut out = b"GGUF".to_vec();
    out.extend(version.to_le_bytes());
    out.extend(tensors.to_le_bytes());
    out.extend(pairs.to_le_bytes());
    rest.iter().for_each(|part| out.extend(*part));
    out
}

fn word(text: &[u8]) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text].concat()
}

fn pair(key: &[u8], kind: u32, value: &[u8]) -> Vec<u8> {
    [&word(key)[..], &kind.to_le_bytes(), value].concat()
}

fn info(name: &[u8], dims: &[u64], dtype: u32, offset: u64) -> Vec<u8> {
    let mut out = word(name);
    out.extend((dims.len() as u32).to_le_bytes());
    dims.iter().for_each(|dim| out.extend(dim.to_le_bytes()));
    out.extend(dtype.to_le_bytes());
    out.extend(offset.to_le_bytes());
    out
}

/// The start of an array: what of, how many.
fn array(kind: u32, count: u64) -> Vec<u8> {
    [&kind.to_le_bytes()[..], &count.to_le_bytes()].concat()
}

fn padded(mut bytes: Vec<u8>, data: usize) -> Vec<u8> {
    bytes.resize(bytes.len().next_multiple_of(32) + data, 7);
    bytes
}

#[track_caller]
fn refused(found: Result<Model>, status: Status, words: &str) {
    let error = found.err().unwrap_or_else(|| panic!("{words:?} was expected"));
    assert_eq!(error.status(), status, "{error}");
    assert!(error.message().contains(words), "{error} does not say {words:?}");
}

/// The same of a whole file, without and with a file system; with the path in front.
#[track_caller]
fn refused_file(bytes: &[u8], status: Status, words: &str) {
    let (found, memory) = largest(|| parse_gguf(bytes, bytes.len() as u64));
    assert!(memory <= 8 * bytes.len() + 4096, "{memory} bytes at once");
    refused(found, status, words);
    let scratch = Scratch::created("models-hostile");
    let path = scratch.0.join("bad.gguf");
    std::fs::write(&path, bytes).expect("written");
    let found = Model::open(std::slice::from_ref(&path));
    let error = found.as_ref().expect_err("refused");
    assert!(error.message().contains("bad.gguf: "), "{error}");
    refused(found, status, words);
}

use Status::{Corrupt, Invalid, Limit, NotFound, Unsupported};

#[test]
fn invalid_gguf_headers_are_rejected() {
    let most = u64::MAX;
    let (max, key) = (most.to_le_bytes(), word(b"k"));
    for (bytes, status, words) in [
        (gguf(0, 0, 0, &[]), Corrupt, "version 0, at byte 4"),
        (gguf(1, 0, 0, &[]), Unsupported, "version 1"),
        (gguf(4, 0, 0, &[]), Unsupported, "not known"),
        (gguf(3u32.swap_bytes(), 0, 0, &[]), Unsupported, "big-endian"),
        (b"GGUF\x03\0".to_vec(), Corrupt, "ends at 6"),
        (gguf(3, most, 0, &[]), Corrupt, "18446744073709551615 tensors"),
        (gguf(3, 0, most, &[]), Corrupt, "too short, at byte 8"),
        (gguf(3, most / 2, most / 2, &[]), Corrupt, "too short"),
        (gguf(3, 1, 0, &[&[0; 23]]), Corrupt, "1 tensors"),
        (gguf(3, 0, 1, &[&max, &[0; 5]]), Corrupt, "needs 18446744073709551615"),
        (gguf(3, 0, 1, &[&pair(b"", 0, b"x")]), Corrupt, "without a name"),
        (gguf(3, 0, 1, &[&pair(b"\xFF", 0, b"x")]), Corrupt, "UTF-8, at byte 24"),
        (gguf(3, 0, 1, &[&pair(b"k", 13, b"")]), Corrupt, "kind 13"),
        (gguf(3, 0, 1, &[&pair(b"k", 8, &max)]), Corrupt, "ends at"),
        (gguf(3, 0, 1, &[&pair(b"k", 9, &array(13, 1))]), Corrupt, "kind 13"),
        (gguf(3, 0, 1, &[&pair(b"k", 9, &array(0, most))]), Corrupt, "array of 1844"),
        (gguf(3, 0, 1, &[&pair(b"k", 9, &array(10, most / 4))]), Corrupt, "array of"),
        (gguf(3, 0, 1, &[&pair(b"k", 9, &array(8, 1))]), Corrupt, "array of 1 "),
        (gguf(3, 0, 1, &[&pair(b"k", 9, &[array(8, 1), max.to_vec()].concat())]), Corrupt, "ends"),
        (gguf(3, 0, 1, &[&pair(b"k", 9, &array(9, 1).repeat(9))]), Corrupt, "deeper than 4"),
        (gguf(3, 0, 2, &[&pair(b"k", 0, b"x").repeat(2)]), Corrupt, "\"k\" twice"),
        (gguf(3, 0, 2, &[&key, &[0; 4], b"x", &key]), Corrupt, "at byte"),
    ] {
        refused_file(&bytes, status, words);
    }
    for value in [
        pair(b"general.alignment", 4, &[0; 4]),
        pair(b"general.alignment", 4, &[3, 0, 0, 0]),
        pair(b"general.alignment", 8, &word(b"32")),
    ] {
        refused_file(&gguf(3, 0, 1, &[&value]), Corrupt, "general.alignment");
    }
    // Counts that a file could hold, but that no model needs.
    let many = gguf(3, (1 << 20) + 1, 0, &[]);
    refused(parse_gguf(&many, 1 << 40), Limit, "1048577 tensors");
    let arch = [pair(b"general.architecture", 8, &word(b"x")), pair(b"x.block_count", 10, &max)];
    refused_file(&gguf(3, 0, 2, &[&arch.concat()]), Corrupt, "x.block_count");
}

#[test]
fn invalid_gguf_tensors_are_rejected() {
    let most = u64::MAX;
    let long = vec![b'x'; 513];
    for (info, status, words) in [
        (info(&long, &[4], 0, 0), Limit, "513 bytes"),
        (info(b"\xFF", &[4], 0, 0), Corrupt, "UTF-8"),
        (info(b"", &[4], 0, 0), Corrupt, "no printable name"),
        (info(b"a\0b", &[4], 0, 0), Corrupt, "no printable name"),
        (info(b"t", &[1; 5], 0, 0), Corrupt, "\"t\" with 5 dimensions"),
        (info(b"t", &[4, 0], 0, 0), Corrupt, "dimension of 0"),
        (info(b"t", &[1 << 40, 1 << 40], 0, 0), Corrupt, "1099511627776x1099511627776"),
        (info(b"t", &[most], 0, 0), Corrupt, "too large"),
        (info(b"t", &[31, 32], 8, 0), Corrupt, "no whole blocks"),
        (info(b"t", &[4], 4, 0), Unsupported, "Q4_2"),
        (info(b"t", &[4], 33, 0), Unsupported, "Q4_0_8_8"),
        (info(b"t", &[4], 38, 0), Unsupported, "IQ4_NL_8_8"),
        (info(b"the one", &[4], 99, 0), Unsupported, "\"the one\" is of the unknown type 99"),
        (info(b"t", &[4], 0, 8), Corrupt, "no multiple of 32"),
        (info(b"t", &[4], 0, most - 31), Corrupt, "too far"),
        (info(b"t", &[4], 0, most / 2 - 31), Corrupt, "cut off"),
        (info(b"t", &[4], 0, 64), Corrupt, "\"t\" has 16 bytes at 128, beyond the end at 128"),
        (info(b"t", &[17], 0, 0), Corrupt, "beyond the end"),
    ] {
        let bytes = padded(gguf(3, 1, 0, &[&info]), 64);
        refused_file(&bytes, status, words);
    }
    let two = |a: Vec<u8>, b: Vec<u8>| padded(gguf(3, 2, 0, &[&a, &b]), 64);
    let bytes = two(info(b"a", &[4], 0, 32), info(b"a", &[4], 0, 0));
    refused_file(&bytes, Corrupt, "two tensors are called \"a\"");
    let bytes = two(info(b"a", &[9], 0, 0), info(b"b", &[1], 0, 32));
    refused_file(&bytes, Corrupt, "\"a\" and \"b\" overlap");
    let bytes = two(info(b"a", &[8], 0, 0), info(b"b", &[8], 0, 32));
    sound(&parse_gguf(&bytes, bytes.len() as u64).expect("just fits"));
    // Version 2 is the same, holes are allowed, and a tensor may have no dimensions.
    let bytes = padded(gguf(2, 1, 0, &[&info(b"a", &[], 0, 32)]), 36);
    let model = parse_gguf(&bytes, bytes.len() as u64).expect("sound");
    assert_eq!((model.tensors[0].bytes, model.bytes()), (4, 4));
}

#[test]
fn truncated_files_are_rejected() {
    let sizes = Sizes { layers: 1, experts: 2, vocabulary: 5, ..Sizes::default() };
    let made = sizes.gguf();
    let head = gguf_head(&made, &sizes.metadata());
    let data: u64 = made.iter().map(|made| made.bytes().next_multiple_of(32)).sum();
    let last = made.last().expect("one").bytes();
    let whole = head.len() as u64 + data - (last.next_multiple_of(32) - last);
    for cut in (0..head.len() as u64).chain([whole - 1]) {
        let head = &head[..head.len().min(cut as usize)];
        let error = parse_gguf(head, cut).expect_err("cut off");
        assert_eq!(error.status(), Corrupt, "{cut}: {error}");
        // The same start of a file that continues: more is asked for, never too much.
        if cut < whole - 1
            && let Err(Stop::More(needed)) = Model::of_gguf(file(whole), head)
        {
            assert!(cut < needed && needed <= whole, "{cut} {needed}");
        }
    }
    sound(&parse_gguf(&head, whole).expect("the padding of the last tensor may be missing"));

    let made = sizes.safetensors(false);
    let head = safetensors_head(&made);
    let whole = head.len() as u64 + made.iter().map(Made::bytes).sum::<u64>();
    let scratch = Scratch::created("models-cut");
    let path = scratch.0.join("model.safetensors");
    write_safetensors(&scratch.0, &made, "{}", 1);
    let bytes = std::fs::read(&path).expect("written");
    assert_eq!(bytes.len() as u64, whole);
    for cut in (0..head.len()).step_by(7).chain([bytes.len() - 1]) {
        std::fs::write(&path, &bytes[..cut]).expect("written");
        refused(Model::open(std::slice::from_ref(&path)), Corrupt, "model.safetensors: ");
    }
}

fn safetensors_file(json: &str, data: usize) -> Vec<u8> {
    let mut out = (json.len() as u64).to_le_bytes().to_vec();
    out.extend(json.as_bytes());
    out.resize(out.len() + data, 7);
    out
}

#[test]
fn invalid_safetensors_files_are_rejected() {
    let scratch = Scratch::created("models-lie");
    let path = scratch.0.join("bad.safetensors");
    let one = |dtype: &str, shape: &str, offsets: &str| {
        format!("\"dtype\":\"{dtype}\",\"shape\":[{shape}],\"data_offsets\":[{offsets}]")
    };
    let t = |dtype, shape, offsets| format!("{{\"t\":{{{}}}}}", one(dtype, shape, offsets));
    let u8s = |from: u64, to: u64| {
        format!("{{{}}}", one("U8", &(to - from).to_string(), &format!("{from},{to}")))
    };
    let long = format!("{{\"{}\":{}}}", "x".repeat(513), u8s(0, 1));
    let deep = format!("{{\"t\":{{\"x\":{}", "[".repeat(100));
    for (json, data, status, words) in [
        ("".into(), 0, Corrupt, "'{'"),
        ("[]".into(), 0, Corrupt, "'{'"),
        ("{\"t\":".into(), 0, Corrupt, "at byte"),
        ("{}\0\0".into(), 0, Corrupt, "something after"),
        ("{}".into(), 1, Corrupt, "something follows"),
        ("{\"__metadata__\":{\"a\":1}}".into(), 0, Corrupt, "at byte"),
        ("{\"t\":5}".into(), 0, Corrupt, "at byte"),
        ("{\"t\":{\"dtype\":\"U8\",\"shape\":[1]}}".into(), 1, Corrupt, "\"t\" lacks"),
        (t("F128", "1", "0,16"), 16, Unsupported, "\"t\" is of the unknown type \"F128\""),
        (t("u8", "1", "0,1"), 1, Unsupported, "\"u8\""),
        (t("U8", "-1", "0,1"), 1, Corrupt, "-1"),
        (t("U8", "1", "1,0"), 1, Corrupt, "before it begins"),
        (t("U8", "1", "0,1,2"), 1, Corrupt, "3 data_offsets"),
        (t("U8", "1", "0"), 1, Corrupt, "1 data_offsets"),
        (t("F32", "1", "0,1"), 1, Corrupt, "F32 of shape [1] is not 1 bytes"),
        (t("F4", "3", "0,2"), 2, Corrupt, "F4 of shape [3]"),
        (t("U8", "9223372036854775808,2", "0,0"), 0, Corrupt, "is not 0 bytes"),
        (t("U8", "18446744073709551616", "0,1"), 1, Corrupt, "64 bits"),
        (t("U8", "1,1,1,1,1,1,1,1,1", "0,1"), 1, Limit, "more than 8 dimensions"),
        (t("U8", "1", "0,1"), 0, Corrupt, "cut off"),
        (t("U8", "1", "2,3"), 3, Corrupt, "leaves a hole"),
        (t("U8", "0", "18446744073709551615,18446744073709551615"), 0, Corrupt, "beyond any file"),
        (format!("{{\"a\":{},\"b\":{}}}", u8s(0, 2), u8s(1, 3)), 3, Corrupt, "\"b\" at"),
        (format!("{{\"a\":{},\"a\":{}}}", u8s(0, 1), u8s(1, 2)), 2, Corrupt, "called \"a\""),
        (
            t("U8", "1", "0,1").replace("\"shape\"", "\"dtype\":\"I8\",\"shape\""),
            1,
            Corrupt,
            "twice",
        ),
        (long, 1, Limit, "513 bytes"),
        (deep, 0, Corrupt, "deeper"),
    ] {
        let bytes = safetensors_file(&json, data);
        let head = &bytes[8..8 + json.len()];
        let parse = || Model::of_safetensors(file(bytes.len() as u64), head);
        let (found, memory) = largest(parse);
        assert!(memory <= 8 * bytes.len() + 4096, "{memory} bytes at once");
        refused(found, status, words);
        std::fs::write(&path, &bytes).expect("written");
        let found = Model::open(std::slice::from_ref(&path));
        assert!(found.as_ref().expect_err("bad").message().contains("bad.safetensors: "));
        refused(found, status, words);
    }
    // Tensors without bytes, and tensors of single numbers, are sound, and so is no tensor.
    for (json, data, count) in [
        (t("U8", "0,3", "0,0"), 0, 1),
        (t("F64", "", "0,8"), 8, 1),
        ("{\"__metadata__\":null}  ".into(), 0, 0),
        (format!("{{\"a\":{},\"z\":{},\"b\":{}}}", u8s(0, 1), u8s(1, 1), u8s(1, 2)), 2, 3),
    ] {
        std::fs::write(&path, safetensors_file(&json, data)).expect("written");
        let model = Model::open(std::slice::from_ref(&path)).expect("sound");
        sound(&model);
        assert_eq!(model.tensors.len(), count);
        grouped(&Units::of(&model).expect("sound"), &model, 4096);
    }
}

/// A file that has a length, but hardly any bytes.
fn sparse(path: &Path, start: &[u8], bytes: u64) {
    std::fs::write(path, start).expect("written");
    let file = std::fs::File::options().write(true).open(path).expect("there");
    file.set_len(bytes).expect("a long file");
}

fn open(path: &Path) -> Result<Model> {
    Model::open(&[path.to_path_buf()])
}

#[test]
fn non_models_are_rejected() {
    let scratch = Scratch::created("models-none");
    let dir = &scratch.0;
    let write = |name: &str, bytes: &[u8]| {
        let path = dir.join(name);
        std::fs::write(&path, bytes).expect("written");
        path
    };
    refused(Model::open(&[]), Invalid, "no file is named");
    refused(open(&dir.join("nowhere")), NotFound, "nowhere: ");
    refused(open(dir), NotFound, "no model files");
    refused(open(Path::new("/dev/zero")), Invalid, "/dev/zero: a device");
    refused(open(&write("empty", b"")), Corrupt, "empty: the file is empty");
    refused(open(&write("short", b"GGU")), Corrupt, "short: 3 bytes");
    refused(open(&write("text", b"hello, I am some text")), Corrupt, "no model file");
    let many = vec![dir.join("x"); 4097];
    refused(Model::open(&many), Limit, "4097 files");
    // Models of which nothing says that they are one.
    let meta = Sizes::default().metadata();
    let made = [Made::new("t", "F32", &[5], 1)];
    let a = write_gguf(dir, "a", &made, &meta, 1).remove(0);
    let b = write_gguf(dir, "b", &made, &meta, 1).remove(0);
    refused(open(dir), Invalid, "2 GGUF files of different models");
    refused(Model::open(&[a.clone(), b.clone()]), Invalid, "not a file of a split model");
    let c = write_safetensors(dir, &made, "{}", 1);
    refused(open(dir), Invalid, "both GGUF and safetensors");
    refused(Model::open(&[a.clone(), c.clone()]), Invalid, "cannot form one model");
    refused(Model::open(&[c.clone(), c.clone()]), Corrupt, "two tensors are called \"t\"");
    open(&c).expect("sound");
    write("config.json", b"{\"n_layer\": ");
    refused(open(&c), Corrupt, "config.json: ");
    open(&a).expect("GGUF files have no such thing");
    // Links are what caches are made of.
    let link = dir.join("link.gguf");
    std::os::unix::fs::symlink("a.gguf", &link).expect("a link");
    assert!(open(&link).expect("sound").tensors == open(&a).expect("sound").tensors);
}

#[test]
fn model_directories_are_resolved_or_ambiguous() {
    let scratch = Scratch::created("models-directory");
    let dir = &scratch.0;
    let made = Sizes::default().safetensors(false);
    let main = write_safetensors(dir, &made, "{}", 1);
    let whole = open(dir).expect("one file");
    // Copies of the weights by other names do not count, and so it is with adapters.
    let adapter = [Made::new("layers.0.x", "F32", &[5], 1)];
    let other = dir.join("consolidated.safetensors");
    std::fs::write(&other, [safetensors_head(&adapter), vec![0; 20]].concat()).expect("written");
    assert!(open(dir).expect("the main one") == whole);
    assert_eq!(Model::open(&[main.clone(), other]).expect("both").files.len(), 2);
    std::fs::rename(&main, dir.join("one.safetensors")).expect("ours");
    refused(open(dir), Invalid, "2 safetensors files without index");
    let index = write_safetensors(dir, &made, "{}", 2);
    assert_eq!(open(dir).expect("an index").files.len(), 2);
    std::fs::copy(index, dir.join("b.safetensors.index.json")).expect("copied");
    refused(open(dir), Invalid, "2 indexes");
    let scratch = Scratch::created("models-directory-gguf");
    let paths = write_gguf(&scratch.0, "m", &Sizes::default().gguf(), &[], 2);
    std::fs::copy(&paths[0], scratch.0.join("mmproj-m.gguf")).expect("copied");
    assert_eq!(open(&scratch.0).expect("the model alone").files.len(), 2);
}

#[test]
fn incomplete_split_models_are_rejected() {
    let scratch = Scratch::created("models-split");
    let dir = &scratch.0;
    let (sizes, made) = (Sizes::default(), Sizes::default().gguf());
    let paths = write_gguf(dir, "m", &made, &sizes.metadata(), 3);
    let whole = open(&paths[1]).expect("sound");
    let put = |path: &Path, bytes: &[u8]| std::fs::write(path, bytes).expect("written");
    let kept: Vec<_> = paths.iter().map(|path| std::fs::read(path).expect("there")).collect();

    std::fs::remove_file(&paths[1]).expect("ours");
    refused(open(&paths[0]), NotFound, "missing");
    refused(open(&paths[0]), NotFound, "m-00002-of-00003.gguf");
    refused(open(dir), NotFound, "m-00002-of-00003.gguf");
    put(&paths[1], &kept[0]);
    refused(open(&paths[0]), Corrupt, "are both file 1");
    put(&paths[1], &kept[1]);
    refused(Model::open(&paths[..2]), Corrupt, "where 2 files are named");
    let odd = dir.join("renamed.gguf");
    put(&odd, &kept[0]);
    refused(open(&odd), Invalid, "name them all");
    let four = dir.join("m-00001-of-00004.gguf");
    put(&four, &kept[0]);
    refused(open(&four), Corrupt, "one of 3 files, not of 4");
    std::fs::remove_file(&four).expect("ours");
    let named = [paths[2].clone(), odd.clone(), paths[1].clone()];
    assert_eq!(Model::open(&named).expect("sound").tensors, whole.tensors);
    std::fs::remove_file(&odd).expect("ours");

    let last = made[..2].to_vec();
    let said = [("split.no", 2), ("split.count", 3), ("split.tensors.count", 33)];
    let said = said.map(|(key, n)| (key.into(), Meta::U16(n)));
    put(&paths[2], &padded(gguf_head(&last, &said), 1 << 20));
    refused(open(&paths[0]), Corrupt, "split.tensors.count is");
    let mut said = said.to_vec();
    said.truncate(2);
    // As many as the last file has, but those that are in the first one.
    let fit = made[..made.len() - 2 * made.len().div_ceil(3)].to_vec();
    put(&paths[2], &padded(gguf_head(&fit, &said), 1 << 20));
    refused(open(&paths[0]), Corrupt, "two tensors are called");
    let (_, memory) = largest(|| {
        let huge = [("split.count".into(), Meta::U64(u64::MAX))];
        put(&odd, &gguf_head(&[], &huge));
        refused(open(&odd), Limit, "more than 4096");
    });
    assert!(memory < 1 << 16);
}

#[test]
fn incomplete_sharded_models_are_rejected() {
    let scratch = Scratch::created("models-sharded");
    let dir = &scratch.0;
    let made = Sizes::default().safetensors(false);
    let index = write_safetensors(dir, &made, "{}", 3);
    let text = std::fs::read_to_string(&index).expect("there");
    let whole = open(&index).expect("sound");
    assert_eq!(whole.files.len(), 3);
    let put = |from: &str, to: &str| {
        assert!(text.contains(from));
        std::fs::write(&index, text.replacen(from, to, 1)).expect("written");
        open(&index)
    };
    let lm = "\"lm_head.weight\": \"model-00003-of-00003.safetensors\"";
    let moved = lm.replace("00003-of", "00001-of");
    refused(put(lm, &moved), Corrupt, "\"lm_head.weight\" is not in \"model-00001-of-00003");
    let strange = lm.replace("lm_head", "strange");
    refused(put(lm, &strange), Corrupt, "\"strange.weight\" is not in");
    for name in ["../model-00003-of-00003.safetensors", "/etc/passwd", "..", "", "a/b"] {
        let led = format!("\"lm_head.weight\": \"{name}\"");
        refused(put(lm, &led), Corrupt, "only names of files beside the index");
    }
    refused(put("weight_map", "map"), Corrupt, "\"weight_map\" is missing");
    refused(put("}", "]"), Corrupt, "index.json: ");
    refused(put("-00003-of-00003", "-00004-of-00004"), NotFound, "a shard is missing");
    // Tensors that the index leaves out are no part of the model.
    let without = put(&format!(", {lm}"), "").expect("sound");
    assert_eq!(without.tensors.len() + 1, whole.tensors.len());
    assert!(without.tensors.iter().all(|tensor| tensor.name != "lm_head.weight"));
    assert_ne!(without.fingerprint(), whole.fingerprint());
    grouped(&Units::of(&without).expect("sound"), &without, 4096);
}

#[test]
fn fingerprints_depend_on_headers_not_on_paths() {
    let sizes = Sizes { experts: 2, ..Sizes::default() };
    let mut seen = BTreeMap::new();
    let mut note = |what: &str, model: &Model| {
        assert_eq!(seen.insert(model.fingerprint(), what.to_string()), None, "{what}");
    };
    let one = Scratch::created("models-print");
    let two = Scratch::created("models-print-elsewhere");
    let (made, meta) = (sizes.gguf(), sizes.metadata());
    let here = open(&write_gguf(&one.0, "a", &made, &meta, 1)[0]).expect("sound");
    let there = open(&write_gguf(&two.0, "b", &made, &meta, 1)[0]).expect("sound");
    assert!(here != there && here.fingerprint() == there.fingerprint());
    note("plain", &here);
    let split = open(&write_gguf(&one.0, "a", &made, &meta, 2)[0]).expect("sound");
    note("split", &split);
    let mut turned = made.clone();
    turned.swap(2, 3);
    note("another order", &open(&write_gguf(&one.0, "c", &turned, &meta, 1)[0]).expect("sound"));
    let mut renamed = made.clone();
    renamed[1].name.push('x');
    note("another name", &open(&write_gguf(&one.0, "d", &renamed, &meta, 1)[0]).expect("sound"));
    let mut typed = made.clone();
    typed[0].dtype = "BF16";
    note("another type", &open(&write_gguf(&one.0, "e", &typed, &meta, 1)[0]).expect("sound"));
    let mut other = meta.clone();
    other[1].1 = Meta::U32(7);
    note("other facts", &open(&write_gguf(&one.0, "f", &made, &other, 1)[0]).expect("sound"));
    let made = sizes.safetensors(true);
    note("safetensors", &open(&write_safetensors(&two.0, &made, "{}", 1)).expect("sound"));
}

/// A model of tensors of bytes, one after the other.
fn named(tensors: &[(&str, &'static str, &[u64], u64)], experts: u32) -> Model {
    let mut offset = 100;
    let tensors = tensors.iter().map(|(name, dtype, dims, bytes)| {
        let name = name.to_string();
        let made = Tensor { name, dtype, dims: dims.to_vec(), file: 0, offset, bytes: *bytes };
        offset += bytes;
        made
    });
    let tensors: Vec<_> = tensors.collect();
    let mut model = Model::named(vec![file(offset)], tensors).expect("sound");
    model.facts.experts = experts;
    model
}

fn unit_names(model: &Model) -> Vec<String> {
    let units = Units::of(model).expect("sound");
    grouped(&units, model, 4096);
    units.units.into_iter().map(|unit| unit.name).collect()
}

#[test]
fn stacked_tensors_are_split_only_by_expert() {
    let experts = |n: u32| {
        let mut names = vec!["layer 0".to_string()];
        names.extend((0..n).map(|e| format!("layer 0 expert {e}")));
        names
    };
    let up = ("blk.0.ffn_up_exps.weight", "I8", &[8u64, 2, 4][..], 64);
    // With the biases and scales of each expert, and what belongs to all.
    let bias = ("blk.0.ffn_up_exps.bias", "I8", &[2u64, 4][..], 8);
    let scale = ("blk.0.ffn_up_exps.scale", "F32", &[4u64][..], 16);
    let gate = ("blk.0.ffn_gate_inp.weight", "I8", &[8u64, 4][..], 32);
    let model = named(&[up, bias, scale, gate], 0);
    let units = Units::of(&model).expect("sound");
    assert_eq!(unit_names(&model), experts(4));
    assert_eq!(units.units.iter().map(|unit| unit.bytes).collect::<Vec<_>>(), [32, 22, 22, 22, 22]);
    // Where the layers differ, each has its own number, whatever the files say of all.
    let other = ("blk.1.ffn_up_exps.weight", "I8", &[8u64, 2, 2][..], 32);
    let mut names = experts(4);
    names.extend(["layer 1 expert 0".into(), "layer 1 expert 1".into()]);
    assert_eq!(unit_names(&named(&[up, bias, scale, gate, other], 4)), names);
    // Tensors of a layer that disagree: the files decide, or nothing is divided.
    let odd = ("blk.0.ffn_gate_exps.weight", "I8", &[8u64, 2, 3][..], 48);
    assert_eq!(unit_names(&named(&[up, odd], 4)), experts(4));
    assert_eq!(unit_names(&named(&[up, odd], 0)), experts(0));
    // Without a third dimension nothing but the files says what the last one is.
    let flat = ("model.layers.0.mlp.experts.mlp.w1", "I8", &[8u64, 8][..], 64);
    assert_eq!(unit_names(&named(&[flat], 0)), experts(0));
    assert_eq!(unit_names(&named(&[flat], 4)), experts(0));
    assert_eq!(unit_names(&named(&[flat], 8)), experts(8)[1..]);
    // Halves of a byte cannot be told apart.
    let halves = ("model.layers.0.mlp.experts.w", "F4", &[1u64, 1, 6][..], 3);
    assert_eq!(unit_names(&named(&[halves], 6)), experts(0));
    // More than can be.
    let most = 70_000;
    let many = ("blk.0.ffn_up_exps.weight", "I8", &[1u64, 1, most][..], most);
    let error = Units::of(&named(&[many], 0)).expect_err("too many");
    assert_eq!(error.status(), Limit, "{error}");
    let many: Vec<_> = (0..5).map(|n| format!("blk.{n}.ffn_up_exps.weight")).collect();
    let many: Vec<_> = many.iter().map(|n| (&**n, "I8", &[1u64, 1, 60_000][..], 60_000)).collect();
    let error = Units::of(&named(&many, 0)).expect_err("too many");
    assert!(error.status() == Limit && error.message().contains("262144 units"), "{error}");
}

#[test]
fn nearby_ranges_are_read_together() {
    let at = |offset, bytes| Range { file: 0, offset, bytes };
    let entry = |name: &str, role, ranges: &[Range]| Entry {
        name: name.into(),
        role,
        layer: if role == Role::Layer { 0 } else { NONE },
        expert: NONE,
        ranges: ranges.to_vec(),
    };
    let scratch = Scratch::created("models-near");
    let path = scratch.0.join("x");
    std::fs::write(&path, vec![0; 100_000]).expect("written");
    let paths = [path];
    // Gaps of a byte less than a grain, and of a grain.
    let ranges = [at(20_295, 5), at(5_000, 1_000), at(10_095, 104), at(14_295, 1)];
    let entries = vec![entry("b", Role::Head, &ranges), entry("a", Role::Layer, &[at(6_000, 95)])];
    let (model, units) = Units::table(&paths, entries.clone()).expect("sound");
    assert_eq!((model.format, units.find("a"), units.layer(0)), (Format::Table, Some(1), Some(1)));
    let extent = |offset, bytes, at| Extent { file: 0, offset, bytes, at };
    let expected = [
        extent(5_000, 5_199, 904),
        extent(14_295, 1, 8_192 + 2_007),
        extent(20_295, 5, 12_288 + 3_911),
    ];
    assert_eq!(units.units[0].extents, expected);
    assert_eq!((units.units[0].bytes, units.units[0].image_bytes), (1_110, 16_384 + 4_096 - 4_096));
    grouped(&units, &model, 1);
    for (spoil, words) in [
        (
            Box::new(|e: &mut Vec<Entry>| e[1].ranges[0].offset = 5_999)
                as Box<dyn Fn(&mut Vec<Entry>)>,
            "overlap",
        ),
        (Box::new(|e| e[1].ranges[0].bytes = 0), "without bytes"),
        (Box::new(|e| e[1].ranges.clear()), "\"a\" has no bytes"),
        (Box::new(|e| e[1].ranges[0].file = 1), "file 1 of 1"),
        (Box::new(|e| e[1].ranges[0].offset = 99_906), "beyond the end at 100000"),
        (Box::new(|e| e[1].ranges[0].offset = u64::MAX), "beyond the end"),
        (Box::new(|e| e[1].layer = NONE), "does not match its role"),
        (Box::new(|e| e[1].expert = 3), "does not match its role"),
        (Box::new(|e| e[0].layer = 3), "does not match its role"),
        (Box::new(|e| e[1].name = "b".into()), "two tensors are called \"b#0\""),
        (Box::new(|e| (e[0].role, e[0].layer) = (Role::Layer, 0)), "are the same"),
        (Box::new(|e| e[1].name = "a\n".into()), "no printable name"),
    ] {
        let mut entries = entries.clone();
        spoil(&mut entries);
        refused(Units::table(&paths, entries).map(|(model, _)| model), Invalid, words);
    }
    let mut beyond = entries.clone();
    beyond[1].layer = 1 << 16;
    refused(Units::table(&paths, beyond).map(|(model, _)| model), Limit, "below 65536");
}

#[test]
fn units_of_another_model_are_rejected() {
    let sizes = Sizes { experts: 3, layers: 2, ..Sizes::default() };
    let head = gguf_head(&sizes.gguf(), &sizes.metadata());
    let data: u64 = sizes.gguf().iter().map(|made| made.bytes().next_multiple_of(32)).sum();
    let model = parse_gguf(&head, head.len() as u64 + data).expect("sound");
    let units = Units::of(&model).expect("sound");
    let expert = units.expert(1, 2).expect("there") as usize;
    type Spoil = Box<dyn Fn(&mut Units)>;
    let spoils: Vec<Spoil> = vec![
        Box::new(|u| u.units[1].bytes += 1),
        Box::new(|u| u.units[1].image_bytes += 4096),
        Box::new(|u| u.units.truncate(u.units.len() - 1)),
        Box::new(|u| u.parts.truncate(u.parts.len() - 1)),
        Box::new(|u| u.parts.swap(0, 1)),
        Box::new(|u| u.parts.push(u.parts[u.parts.len() - 1])),
        Box::new(|u| u.parts[0].tensor = 1 << 19),
        Box::new(|u| u.parts[0].from = 1),
        Box::new(|u| u.parts[0].from = u64::MAX),
        Box::new(|u| u.parts[0].bytes -= 1),
        Box::new(|u| u.parts[0].bytes = u64::MAX),
        Box::new(|u| u.parts[0].at += 1),
        Box::new(|u| u.units[0].extents[0].at += 4096),
        Box::new(|u| u.units[0].extents[0].offset += 4096),
        Box::new(|u| u.units[0].extents[0].offset = u64::MAX),
        Box::new(|u| u.units[0].extents[0].bytes = 0),
        Box::new(|u| u.units[0].extents[0].file = 1),
        Box::new(|u| u.units[0].extents.clear()),
        Box::new(move |u| u.units[expert].extents.swap(0, 1)),
        Box::new(move |u| u.units.swap(expert, expert - 1)),
    ];
    for (n, spoil) in spoils.iter().enumerate() {
        let mut spoilt = units.clone();
        spoil(&mut spoilt);
        let error = spoilt.check(&model).expect_err("spoilt");
        assert_eq!(error.status(), Invalid, "{n}: {error}");
    }
}

#[test]
fn oversized_headers_are_rejected_before_allocation() {
    let scratch = Scratch::created("models-long");
    let path = scratch.0.join("long");
    let text = pair(b"k", 8, &(300u64 << 20).to_le_bytes());
    sparse(&path, &gguf(3, 0, 1, &[&text]), 1 << 30);
    let (found, memory) = largest(|| Model::open(std::slice::from_ref(&path)));
    refused(found, Limit, "header is longer than");
    assert!(memory <= 2 << 20, "{memory} bytes at once");
    sparse(&path, &100_000_001u64.to_le_bytes(), 1 << 30);
    let (found, memory) = largest(|| Model::open(std::slice::from_ref(&path)));
    refused(found, Limit, "more than 100000000");
    assert!(memory <= 4096, "{memory} bytes at once");
    // A vocabulary of many MiB is read in a few steps.
    let words = (0..400_000).map(|n| format!("a word of some length, {n}")).collect();
    let meta = [
        ("tokenizer.ggml.tokens".into(), Meta::Texts(words)),
        ("general.architecture".into(), Meta::Text("x".into())),
    ];
    let made = [Made::new("t", "F32", &[5], 1)];
    let path = write_gguf(&scratch.0, "words", &made, &meta, 1).remove(0);
    let bytes = std::fs::metadata(&path).expect("there").len();
    assert!(bytes > 10 << 20);
    let (model, memory) = largest(|| Model::open(std::slice::from_ref(&path)));
    assert_eq!(model.expect("sound").facts.vocabulary, 400_000);
    assert!(memory as u64 <= bytes, "{memory} bytes at once");
}

#[test]
fn attention_windows_come_from_headers() {
    let head = |architecture: &str, pairs: Vec<(&str, Meta)>| {
        let layers = ("block_count", Meta::U32(12));
        let mut meta = vec![("general.architecture".into(), Meta::Text(architecture.into()))];
        let pairs = pairs.into_iter().chain([layers]);
        meta.extend(pairs.map(|(key, value)| (format!("{architecture}.{key}"), value)));
        let head = gguf_head(&[], &meta);
        Model::of_gguf(file(head.len() as u64), &head)
    };
    let found = |architecture: &str, pairs: Vec<(&str, Meta)>| {
        let facts = head(architecture, pairs).expect("sound").facts;
        (facts.window, facts.windowed_layers)
    };
    let (tokens, pattern) = ("attention.sliding_window", "attention.sliding_window_pattern");
    let window = || (tokens, Meta::U32(1024));
    let flags = |count: u64, flags: &[u8]| {
        Meta::Raw(9, [&7u32.to_le_bytes()[..], &count.to_le_bytes(), flags].concat())
    };
    assert_eq!(found("x", vec![]), (0, 0));
    assert_eq!(found("gemma3", vec![window()]), (1024, 10));
    assert_eq!(found("mistral", vec![window()]), (1024, 12));
    assert_eq!(found("llama", vec![window()]), (1024, 0));
    // Metadata of the file overrides the defaults of its family.
    assert_eq!(found("gemma3", vec![window(), (pattern, Meta::U32(4))]), (1024, 9));
    assert_eq!(found("gemma3", vec![window(), (pattern, Meta::U32(1))]), (0, 0));
    assert_eq!(found("x", vec![window(), (pattern, Meta::U64(u64::MAX))]), (1024, 12));
    let listed = [1, 1, 0, 1, 1, 0, 1, 1, 0, 1, 255, 0];
    assert_eq!(found("x", vec![window(), (pattern, flags(12, &listed))]), (1024, 8));
    // With another length or type the windows are unknown.
    assert_eq!(found("x", vec![window(), (pattern, flags(11, &listed[..11]))]), (1024, 0));
    for odd in [Meta::Text("all".into()), Meta::I32(-1), Meta::Numbers(vec![1; 12])] {
        assert_eq!(found("gemma3", vec![window(), (pattern, odd)]), (1024, 0));
    }
    // A list that the file lacks, and a window that nothing has.
    assert!(head("x", vec![window(), (pattern, flags(u64::MAX, &listed))]).is_err());
    let endless = head("x", vec![(tokens, Meta::U64(1 << 32))]);
    assert!(matches!(endless, Err(Stop::Bad(error)) if error.status() == Corrupt));
}
