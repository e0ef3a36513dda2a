//! Checks of what callers do: anything, in any order, from several threads, waiting as they must.

use crate::base::sync::{Arc, spawn};
use crate::device::conformance::bench::{Bench, Room};
use crate::device::conformance::{Outcome, Trouble, need};
use crate::device::{Event, Way};

/// What a caller knows of a room: what is in it once all is done, who wrote it last and who has
/// read it since.
struct Known<'a> {
    room: Room<'a>,
    content: Vec<u8>,
    writer: Option<Event>,
    readers: Vec<Event>,
}

const ROOMS: u64 = 6;

/// Moves bytes between rooms in all places at random, with as few waits as are right.
pub fn anything(bench: &Bench<'_>) -> Outcome {
    for _ in 0..bench.rounds.div_ceil(4) {
        walk(bench, 3_000, 120)?;
    }
    Ok(())
}

fn walk(bench: &Bench<'_>, len: usize, steps: u64) -> Outcome {
    let places = bench.places();
    let know = |_| {
        let room = bench.room(bench.chance.of(&places), len)?;
        Ok(Known { content: room.bytes()?, room, writer: None, readers: Vec::new() })
    };
    let mut rooms = (0..ROOMS).map(know).collect::<Outcome<Vec<Known<'_>>>>()?;
    let streams = u64::from(bench.device.facts().streams);
    let mut all = Vec::new();
    for _ in 0..steps {
        let from = bench.chance.below(ROOMS) as usize;
        if bench.chance.below(5) == 0 {
            // The caller uses a room itself: looks at it, then fills it.
            let known = &mut rooms[from];
            known.writer.take().map_or(Ok(()), |event| bench.wait(event))?;
            let right = known.room.bytes()? == known.content;
            need(right, || "bytes that were waited for are wrong".into())?;
            known.readers.drain(..).try_for_each(|event| bench.wait(event))?;
            known.content = bench.chance.noise(len);
            known.room.set(&known.content)?;
            continue;
        }
        let to = (from + 1 + bench.chance.below(ROOMS - 1) as usize) % ROOMS as usize;
        let mut before: Vec<Event> = rooms[from].writer.into_iter().collect();
        before.extend(rooms[to].writer);
        before.append(&mut rooms[to].readers);
        // One may be left to the device, the others are waited for here.
        let after = before.pop();
        before.into_iter().try_for_each(|event| bench.wait(event))?;
        let copy = match bench.chance.below(2) {
            0 => rooms[from].room.copy(&rooms[to].room, Way::Gather)?,
            _ => rooms[to].room.copy(&rooms[from].room, Way::Scatter)?,
        };
        let event = bench.begin(bench.chance.below(streams) as u32, after, &mut [copy])?;
        all.push(event);
        rooms[from].readers.push(event);
        rooms[to].content = rooms[from].content.clone();
        rooms[to].writer = Some(event);
    }
    all.into_iter().try_for_each(|event| bench.finish(event))?;
    for known in &rooms {
        need(known.room.bytes()? == known.content, || "bytes are wrong at the end".into())?;
    }
    Ok(())
}

/// Several threads do that at once.
pub fn threads(bench: &Bench<'_>) -> Outcome {
    let run = || {
        let (device, opts, kept) = bench.share();
        move || {
            let bench = Bench::new(&device, &opts).beside(kept);
            let said = (0..4).try_for_each(|_| {
                let said = walk(&bench, 9_000, 80);
                bench.settle();
                said
            });
            match said {
                Ok(()) => None,
                Err(Trouble::Nothing(why)) => Some((why.to_string(), bench.is_stuck())),
                Err(Trouble::Wrong(why)) => Some((why, bench.is_stuck())),
            }
        }
    };
    let mut handles = Vec::new();
    let said = Arc::new(crate::base::sync::Mutex::new(Vec::new()));
    for _ in 0..4 {
        let (run, said) = (run(), said.clone());
        let body = move || {
            if let Some(trouble) = run() {
                said.lock().push(trouble);
            }
        };
        handles.push(bench.said("a thread", spawn("kvt-conformance".into(), body))?);
    }
    let failed = handles.into_iter().filter_map(|handle| handle.join().err()).count();
    need(failed == 0, || "a thread panicked".into())?;
    let said = said.lock();
    if said.iter().any(|(_, is_stuck)| *is_stuck) {
        bench.get_stuck();
    }
    match said.first() {
        None => Ok(()),
        Some((why, _)) => Err(format!("of several threads: {why}").into()),
    }
}
