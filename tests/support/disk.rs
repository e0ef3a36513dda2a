//! Cells whose bytes say whose they are, written to and read from a disk tier, and
//! directories of one as bytes.
#![allow(dead_code)]

use std::collections::BTreeMap;
use std::sync::Arc;

use kvtier::base::memory::{Buffer, MemoryWish};
use kvtier::base::status::Result;
use kvtier::format::checkpoint::Place;
use kvtier::format::keys::{Fingerprint, Key};
use kvtier::format::record::Chunk;
use kvtier::format::seal::Identity;
use kvtier::io::files::{Files, Piece, Way};
use kvtier::io::simulated::{SimFiles, SimOpts};
use kvtier::tier::disk::{
    DiskTier, Get, GetPlane, Gets, Mark, OpenReport, Options, PutPlane, Puts, Recovered, Sink, Spot,
};

pub const SEGMENT: u64 = 16 * 4096;
pub const BUDGET: u64 = 10 * SEGMENT + 600_000;

pub fn key_of(n: u16) -> Key {
    let mut key = [0xC4; 32];
    key[..2].copy_from_slice(&n.to_le_bytes());
    Key(key)
}

pub fn number_of(key: &Key) -> u16 {
    u16::from_le_bytes([key.0[0], key.0[1]])
}

pub fn chunk_of(n: u16) -> Chunk {
    Chunk {
        namespace: Key([1; 32]),
        parent: key_of(n.wrapping_sub(1)),
        key: key_of(n),
        fingerprint: Fingerprint([7; 32]),
        position: u32::from(n),
        valid_tokens: 256,
    }
}

pub fn identity(n: u16, layer: u32) -> Identity {
    let chunk = chunk_of(n);
    Identity { key: chunk.key, fingerprint: chunk.fingerprint, layer, valid_tokens: 256, codec: 0 }
}

/// The lengths of a cell's planes: whole blocks, or not.
pub fn lengths(n: u16, layer: u32) -> [u64; 2] {
    match (u32::from(n) + layer) % 4 {
        0 => [4096, 4096],
        1 => [4096, 0],
        2 => [3000, 1096],
        _ => [5000, 700],
    }
}

pub fn stored(n: u16, layer: u32) -> u64 {
    lengths(n, layer).iter().sum()
}

/// What a cell's bytes are: nobody else's are like them.
pub fn content(n: u16, layer: u32) -> Vec<u8> {
    let mut state = u64::from(n) << 32 | u64::from(layer) | 1 << 60;
    (0..stored(n, layer))
        .map(|_| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 56) as u8
        })
        .collect()
}

pub fn open(sim: &SimFiles) -> Result<(DiskTier, Recovered, OpenReport)> {
    let options = Options { segment_bytes: SEGMENT, max_open: 3, ..Options::new(BUDGET, [9; 16]) };
    DiskTier::open(Arc::new(sim.clone()), options)
}

/// Writes cells of one chunk; where each is, or why not.
pub fn put(
    tier: &DiskTier,
    n: u16,
    layers: &[u32],
    in_place: bool,
) -> Result<(Mark, Vec<(Spot, u64)>)> {
    let cells: Vec<Vec<u8>> = layers.iter().map(|&layer| content(n, layer)).collect();
    let buffer = Buffer::map(&MemoryWish { bytes: 1 << 20, ..MemoryWish::default() }, None)?;
    let mut puts = Puts::default();
    puts.record(chunk_of(n));
    let mut at = if in_place { 0 } else { 13 };
    for (cell, &layer) in cells.iter().zip(layers) {
        puts.cell(layer, 0, 0, in_place);
        let mut from = buffer.range(at, 16384).expect("room");
        // SAFETY: the test's own buffer, 16 KiB for each cell.
        unsafe { from.copy_from_nonoverlapping(cell.as_ptr(), cell.len()) };
        for (kind, bytes) in (1..).zip(lengths(n, layer)) {
            let address = from.cast_const();
            puts.plane(PutPlane { kind, id: 0, version: 1, bytes, address, sum: None });
            from = from.wrapping_add(bytes as usize);
        }
        at += 16384;
    }
    // SAFETY: the buffer outlives the call.
    unsafe { tier.append(&mut puts) };
    let (record, cells) = puts.iter().next().expect("one");
    let mark = record.result.clone()?;
    Ok((mark, cells.iter().map(|cell| (cell.spot, cell.seal)).collect()))
}

/// Reads cells; for each whether it was good, after its bytes were compared.
pub fn read(tier: &DiskTier, cells: &[(u16, u32, Spot, u64)], in_place: bool) -> Vec<Result<()>> {
    let bytes = (cells.len() as u64 + 1) * 16384;
    let buffer = Buffer::map(&MemoryWish { bytes, ..MemoryWish::default() }, None).expect("memory");
    let mut gets = Gets::default();
    let skew = if in_place { 0 } else { 7 };
    for (i, &(n, layer, spot, seal)) in cells.iter().enumerate() {
        gets.cell(spot, identity(n, layer), seal, in_place);
        let mut at = i as u64 * 16384 + skew;
        for (kind, bytes) in (1..).zip(lengths(n, layer)) {
            let address = buffer.range(at, bytes).expect("room");
            gets.plane(GetPlane { kind, id: 0, version: 1, bytes, address });
            at += bytes;
        }
    }
    // SAFETY: the buffer is this test's, 16 KiB for each cell.
    unsafe { tier.read(&mut gets) };
    let check = |(i, get): (usize, &Get)| {
        let (n, layer, ..) = cells[i];
        let at = buffer.range(i as u64 * 16384 + skew, 16384 - skew).expect("room");
        // SAFETY: read above; nobody writes it any more.
        let found = unsafe { std::slice::from_raw_parts(at, stored(n, layer) as usize) };
        if get.result.is_ok() {
            assert!(found == content(n, layer), "wrong bytes of chunk {n} layer {layer}");
        }
        get.result.clone()
    };
    gets.iter().enumerate().map(check).collect()
}

/// The files of a directory.
pub type Image = BTreeMap<String, Vec<u8>>;

/// A disk with these files on it.
pub fn restore(image: &Image) -> SimFiles {
    let sim = SimFiles::new(1, SimOpts::default());
    for (name, bytes) in image {
        let file = sim.create(name, bytes.len() as u64).expect("room");
        let wish = MemoryWish { bytes: bytes.len().max(1) as u64, ..MemoryWish::default() };
        let buffer = Buffer::map(&wish, None).expect("memory");
        let length = bytes.len() as u64;
        let mut pieces = [Piece::one(file, Way::Write, 0, buffer.address(), length)];
        // SAFETY: the test's own buffer, as long as the bytes.
        unsafe {
            buffer.address().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            sim.transfer(&mut pieces);
        }
        assert!(length == 0 || pieces[0].result.is_ok(), "{:?}", pieces[0].result);
        sim.sync(file).expect("a sync");
        sim.close(file);
    }
    sim.sync_names().expect("a sync");
    sim
}

/// A store with a bit of everything: the same bytes whenever it is made.
pub fn sample(checkpoint: bool) -> Image {
    let sim = SimFiles::new(1, SimOpts::default());
    let (tier, ..) = open(&sim).expect("a new store");
    put(&tier, 0, &[0, 1], false).expect("room");
    put(&tier, 1, &[0, 1], true).expect("room");
    let (_, gone) = put(&tier, 2, &[0], false).expect("room");
    tier.put_session(b"first", b"what the store notes").expect("room");
    if checkpoint {
        let cover = tier.cover();
        let places = |n: u16, cells: &[(Spot, u64)]| -> Vec<Place> {
            let place = |(layer, &(spot, seal)): (u32, &(Spot, u64))| Place {
                spot: spot.0,
                seal,
                stored_bytes: stored(n, layer) as u32,
                layer,
                codec: 0,
                planes: 2,
            };
            (0..).zip(cells).map(place).collect()
        };
        // Where they are follows from what was stored before.
        let (_, found, _) = open(&restore(&{
            tier.commit_all().expect("a sync");
            sim.durable().expect("memory")
        }))
        .expect("it opens");
        let all: Vec<(u16, Vec<(Spot, u64)>)> = found
            .chunks()
            .map(|(chunk, places)| {
                let cells = places.iter().map(|place| (Spot(place.spot), place.seal)).collect();
                (number_of(&chunk.key), cells)
            })
            .collect();
        let mut source = |sink: &mut Sink<'_>| {
            all.iter().try_for_each(|(n, cells)| sink.chunk(&chunk_of(*n), &places(*n, cells)))
        };
        tier.checkpoint(&cover, 8, 8, &mut source).expect("room");
    }
    put(&tier, 3, &[0, 1, 2], false).expect("room");
    tier.forget(key_of(2), &[]).expect("room");
    tier.drop_cells(gone.iter().map(|&(spot, _)| (spot, stored(2, 0))));
    tier.put_session(b"second", b"").expect("room");
    tier.put_session(b"third", &[3; 5000]).expect("room");
    tier.close().expect("a sync");
    sim.durable().expect("memory")
}
