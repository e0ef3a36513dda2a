//! `kvtier-bench count`: a number of cells put or got, for tools that count instructions
//! (`ffi-tests/measures/instructions.sh`). Counts do not depend on what else the machine does.

use kvtier::base::status::Result;
use kvtier::store::state::transfer::{Level, TransferKind};
use serde_json::json;

use super::allocations;
use super::fixtures::store::{StateFixture, StoreFixture, Tensors, layout};
use super::fixtures::{Outcome, say};
use super::store::{self, CELL_CASES, CellCase, full_state};

/// Tokens of a chunk, and bytes of K or V for a token: cells of 4 KiB.
const CELL: (u32, u64) = (16, 128);

/// The arguments of `count`.
#[derive(clap::Args)]
pub struct Args {
    /// Bar of the group `store`, such as put_cell_single; without it all bars are listed
    bar: Option<String>,
    /// Eviction policy
    #[arg(long, default_value = "lru")]
    policy: String,
    /// Sessions to put or get
    #[arg(long, default_value_t = 20)]
    sessions: u32,
    /// Use a whole store, with its lock, ops and copy thread; by default its tables alone
    #[arg(long)]
    store: bool,
}

/// Puts or gets the cells, and prints how many and how often memory was allocated.
pub fn run(args: &Args) -> Outcome<()> {
    let Some(name) = &args.bar else {
        CELL_CASES.iter().for_each(|case| println!("{}", case.0));
        return Ok(());
    };
    let case = CELL_CASES.iter().find(|case| case.0 == name);
    let case = case.ok_or(format!("unknown bar '{name}'; `kvtier-bench count` lists the bars"))?;
    let allocations = match args.store {
        true => whole(case, &args.policy, args.sessions),
        false => tables(case, &args.policy, args.sessions),
    };
    let cells = args.sessions * case.2 * case.3;
    println!(
        "{}",
        json!({ "bar": name, "cells": cells, "allocations": allocations.map_err(say)? })
    );
    Ok(())
}

/// Runs the sessions on the tables alone; copies take no time.
fn tables(case: &CellCase, policy: &str, sessions: u32) -> Result<u64> {
    let &(_, kind, layers, chunks, ..) = case;
    let mut fixture = full_state(policy, layers)?;
    let mut allocated = 0;
    for number in 0..=sessions {
        let session = fixture.session(number, chunks)?;
        if kind == TransferKind::Get {
            store::transfer(&mut fixture, session, TransferKind::Put, 0, chunks)?;
        }
        let before = allocations();
        match number {
            // What grows once has grown.
            0 => transfers(&mut fixture, session, case)?,
            _ => kvtier_counted(&mut fixture, session, case)?,
        }
        allocated += if number > 0 { allocations() - before } else { 0 };
        fixture.state.close_session(session)?;
    }
    Ok(allocated)
}

/// Instructions are counted in this function and what it calls.
#[inline(never)]
fn kvtier_counted(fixture: &mut StateFixture, session: u32, case: &CellCase) -> Result<()> {
    std::hint::black_box(());
    transfers(fixture, session, case)
}

fn transfers(fixture: &mut StateFixture, session: u32, case: &CellCase) -> Result<()> {
    let &(_, kind, _, chunks, each, _) = case;
    let mut firsts = (0..chunks).step_by(each as usize);
    firsts.try_for_each(|first| store::transfer(fixture, session, kind, first, each))
}

/// Runs the sessions in a store whose memory is full.
fn whole(case: &CellCase, policy: &str, sessions: u32) -> Result<u64> {
    let &(_, kind, layers, chunks, each, _) = case;
    let cells = u64::from(layers * chunks);
    let bytes = (4 * cells).max(512) * 4096;
    let spec = format!("store(host={bytes}B,policy={policy},chunks=65536)");
    let fixture = StoreFixture::open(&spec, layout(layers as usize, CELL.0, CELL.1)?, None)?;
    let tensors = Tensors::with_token_bytes(cells * 4096, layers as usize, CELL.1)?;
    let document = |number, kind| -> Result<()> {
        let session = fixture.session(number, tensors.tokens)?;
        for first in (0..chunks).step_by(each as usize) {
            let mut range = tensors.whole(false);
            range.first_token = u64::from(first * CELL.0);
            range.tokens = u64::from(each * CELL.0);
            fixture.transfer(session, kind, Level::Ram, range)?;
        }
        fixture.end(session)
    };
    let fill = 2 * bytes / (cells * 4096);
    (0..fill as u32).try_for_each(|number| document(1 + number, TransferKind::Put))?;
    let before = allocations();
    for number in 0..sessions {
        // Gets repeat the last document, which is resident.
        let number = if kind == TransferKind::Get { fill as u32 } else { 1000 + number };
        document(number, kind)?;
    }
    let allocated = allocations() - before;
    fixture.close()?;
    Ok(allocated)
}
