//! A layer-wise restore that overlaps with computing: while one layer is computed, the next ones are
//! loaded.

use std::time::{Duration, Instant};

use kvtier::base::status::Result;
use kvtier::store::state::transfer::{Level, TransferKind};

use super::fixtures::store::{StoreFixture, TOKEN_BYTES, Tensors, layout};
use super::fixtures::{Outcome, Scratch, say};
use super::{Bar, median};

const LAYERS: usize = 32;

/// Ratios of compute time and load time.
const PARTS: [(&str, f64); 3] =
    [("restore_compute_half", 0.5), ("restore_compute_same", 1.0), ("restore_compute_double", 2.0)];

/// Seconds until the first and the last layer of a restore are loaded.
fn load(fixture: &StoreFixture, tensors: &Tensors) -> Result<(f64, f64)> {
    let session = fixture.session(1, tensors.tokens)?;
    let took = fixture.transfer(session, TransferKind::Get, Level::Ram, tensors.whole(true))?;
    fixture.end(session)?;
    Ok((took[0], took.iter().copied().fold(0.0, f64::max)))
}

/// Seconds until the last layer is computed. A layer is computed once it is loaded and the previous
/// one is computed. The processor is idle meanwhile, as beside an accelerator.
fn load_and_compute(fixture: &StoreFixture, tensors: &Tensors, each: Duration) -> Result<f64> {
    let session = fixture.session(1, tensors.tokens)?;
    let begun = Instant::now();
    let mut computed = begun;
    fixture.transfer_then(
        session,
        TransferKind::Get,
        Level::Ram,
        tensors.whole(true),
        |waits| {
            // A loaded layer begins when the previous one ends, as on a stream of a device: a late
            // wake-up of this thread does not count.
            computed = if waits { computed.max(Instant::now()) } else { computed } + each;
            std::thread::sleep(computed.saturating_duration_since(Instant::now()));
        },
    )?;
    fixture.end(session)?;
    Ok(computed.duration_since(begun).as_secs_f64())
}

/// Measures the ratio to the ideal for each compute time.
fn round(ratios: &mut [Vec<f64>; 3], bytes: u64, tensors: &Tensors) -> Outcome<()> {
    let scratch = Scratch::new("overlap");
    std::fs::create_dir_all(&scratch.0).map_err(|e| e.to_string())?;
    let spec = format!(
        "store(host={}B,chunks=65536,disk=disk(path=\"{}\",bytes=8GiB))",
        bytes + (256 << 20),
        scratch.0.join("tier").display()
    );
    // Opened for each measurement, with empty memory.
    let open = || StoreFixture::open(&spec, layout(LAYERS, 256, TOKEN_BYTES)?, None);
    let measured = || -> Result<[f64; 3]> {
        let fixture = open()?;
        let session = fixture.session(1, tensors.tokens)?;
        fixture.transfer(session, TransferKind::Put, Level::Durable, tensors.whole(false))?;
        fixture.close()?;
        // A warm-up: the disk is faster on a second read.
        let fixture = open()?;
        load(&fixture, tensors)?;
        fixture.close()?;
        let mut out = [0.0; 3];
        for (out, (_, part)) in out.iter_mut().zip(PARTS) {
            let fixture = open()?;
            let before = load(&fixture, tensors)?;
            fixture.close()?;
            let fixture = open()?;
            let compute = before.1 * part;
            let took = load_and_compute(
                &fixture,
                tensors,
                Duration::from_secs_f64(compute / LAYERS as f64),
            )?;
            fixture.close()?;
            // Loads are measured before and after, since the disk is shared.
            let fixture = open()?;
            let after = load(&fixture, tensors)?;
            fixture.close()?;
            let (first, last) = ((before.0 + after.0) / 2.0, (before.1 + after.1) / 2.0);
            *out = took / (first + last.max(compute));
        }
        Ok(out)
    };
    let out = measured().map_err(say)?;
    ratios.iter_mut().zip(out).for_each(|(all, one)| all.push(one));
    Ok(())
}

/// Measures the bars.
pub fn bars(quick: bool) -> Vec<Bar> {
    let bar = |(name, _)| {
        Bar::lower(name, "of ideal")
            .baseline("the first layer alone, and the longer of loading and computing")
            .baseline_value(1.0)
            .goal(1.05)
    };
    let mut bars = PARTS.map(bar);
    let (bytes, rounds) = if quick { (128 << 20, 5) } else { (512 << 20, 8) };
    let mut ratios = [const { Vec::new() }; 3];
    let measured = Tensors::new(bytes, LAYERS)
        .map_err(say)
        .and_then(|tensors| (0..rounds).try_for_each(|_| round(&mut ratios, bytes, &tensors)));
    for (bar, ratios) in bars.iter_mut().zip(&mut ratios) {
        match &measured {
            Ok(()) => bar.value = Some(median(ratios)),
            Err(why) => bar.note.clone_from(why),
        }
    }
    bars.into()
}
