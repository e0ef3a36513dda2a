//! `kvtier fsck`: checks the directory of a disk tier that is closed.

use std::path::Path;
use std::process::ExitCode;

use kvtier::base::status::{Error, Status};
use kvtier::io::files::Files;
use kvtier::io::read_only::ReadOnlyFiles;
use kvtier::io::real::{RealFiles, RealOpts};
use kvtier::tier::disk::{CellTotals, Damage, DamageKind, FsckOptions, Report, fsck};
use serde_json::{Value, json};

use crate::human;

const DAMAGED: u8 = 1;
const UNUSABLE: u8 = 2;

/// Checks a directory. The exit status is 0 if it is clean, 1 if it is damaged, 2 if it is not a
/// store, cannot be opened, or is in use.
pub fn run(path: &Path, json: bool, read_only: bool, most: usize) -> ExitCode {
    match check(path, read_only, most) {
        Ok(report) => {
            match json {
                true => print_json(&report),
                false => print(path, &report),
            }
            if report.is_clean() { ExitCode::SUCCESS } else { DAMAGED.into() }
        }
        Err(error) => {
            if json {
                println!("{}", json!({"kind": "error", "message": error.message()}));
            }
            eprintln!("kvtier: {error}");
            if error.status() == Status::Busy {
                eprintln!("kvtier: close the store first, or check it with --read-only");
            }
            UNUSABLE.into()
        }
    }
}

fn check(path: &Path, read_only: bool, most_damage: usize) -> Result<Report, Error> {
    let options = FsckOptions { most_damage };
    // Listed without a lock first: a directory without a store must not become one.
    let read_only_files = ReadOnlyFiles::open(path)?;
    if read_only || read_only_files.list()?.iter().all(|entry| entry.name != "store.kvt") {
        return fsck(&read_only_files, &options);
    }
    // Buffered: probing direct I/O may write.
    let opts = RealOpts { buffered: true, ..RealOpts::default() };
    fsck(&RealFiles::open(path, &opts)?, &options)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn tally(tally: &CellTotals) -> Value {
    json!({"cells": tally.cells, "bytes": tally.bytes})
}

fn print_json(report: &Report) {
    for damage in &report.damage {
        let Damage { file, offset, bytes, what } = damage;
        let mut line = json!({
            "kind": "damage", "what": what.name(), "file": file, "offset": offset, "bytes": bytes,
            "means": what.means(),
        });
        if let DamageKind::Cell { key, layer, .. } | DamageKind::Unknown { key, layer } = what {
            line["chunk"] = key.to_string().into();
            line["layer"] = (*layer).into();
        }
        if let DamageKind::Cell { live, .. } = what {
            line["live"] = (*live).into();
        }
        println!("{line}");
    }
    for c in &report.checkpoints {
        println!(
            "{}",
            json!({
                "kind": "checkpoint", "number": c.number, "bytes": c.bytes, "sound": c.sound,
                "used": c.used, "cells": c.cells, "next_record": c.next_record,
            })
        );
    }
    for n in &report.namespaces {
        let (key, live) = (n.key.to_string(), tally(&n.live));
        println!("{}", json!({"kind": "namespace", "key": key, "chunks": n.chunks, "live": live}));
    }
    println!(
        "{}",
        json!({
            "kind": "summary", "clean": report.is_clean(), "store": hex(&report.store),
            "bytes": report.bytes, "segments": report.segments,
            "foreign_segments": report.foreign_segments, "unfinished": report.unfinished,
            "records": report.records, "forgets": report.forgets, "voids": report.voids,
            "unknown": report.unknown, "live": tally(&report.live), "dead": tally(&report.dead),
            "damaged": tally(&report.damaged), "unchecked": tally(&report.unchecked),
            "duplicates": report.duplicates, "sessions": report.sessions,
            "session_bytes": report.session_bytes, "damages": report.damages,
        })
    );
}

fn print(path: &Path, report: &Report) {
    for Damage { file, offset, bytes, what } in &report.damage {
        let cell = match what {
            DamageKind::Cell { key, layer, .. } | DamageKind::Unknown { key, layer } => {
                format!(" of chunk {key} layer {layer}")
            }
            _ => String::new(),
        };
        println!("{file} at offset {offset}, {bytes} bytes: {}{cell}", what.name());
        println!("    {}", what.means());
    }
    let unlisted = report.damages - report.damage.len() as u64;
    if unlisted > 0 {
        println!("... and {unlisted} more");
    }
    let cells = |t: &CellTotals| format!("{} cells, {}", t.cells, human(t.bytes));
    println!("store       {} in {}", hex(&report.store), path.display());
    println!(
        "files       {}, {} segments ({} foreign), {} unfinished",
        human(report.bytes),
        report.segments,
        report.foreign_segments,
        report.unfinished
    );
    let Report { records, forgets, voids, unknown, .. } = report;
    println!("records     {records} ({forgets} forget, {voids} void, {unknown} unknown)");
    println!("live        {}", cells(&report.live));
    println!("dead        {}, {} duplicates", cells(&report.dead), report.duplicates);
    println!("damaged     {}", cells(&report.damaged));
    if report.unchecked.cells > 0 {
        println!("unchecked   {}", cells(&report.unchecked));
    }
    println!("sessions    {}, {}", report.sessions, human(report.session_bytes));
    for c in &report.checkpoints {
        let state = match (c.sound, c.used) {
            (true, true) => "sound, in use",
            (true, false) => "sound, replaced by a newer one",
            (false, _) => "damaged",
        };
        println!("checkpoint  {}: {state}, {} cells, {}", c.number, c.cells, human(c.bytes));
    }
    for n in &report.namespaces {
        println!("namespace   {}: {} chunks, {}", n.key, n.chunks, cells(&n.live));
    }
    match report.damages {
        0 => println!("clean"),
        n => println!("{n} damaged places"),
    }
}
