//! Why a victim was chosen: what was resident around it, and how the policy
//! ranked that.

use kvtier::base::status::Result;
use kvtier::policy::Rank;
use kvtier::trace::replay::Replay;
use kvtier::trace::requests::{IdMap, Trace};

/// Most children that are shown of one block.
pub const MAX_CHILDREN: usize = 8;

/// A block in the picture.
#[derive(Clone, Debug)]
pub struct Shown {
    /// Its id.
    pub id: u64,
    /// What it continues.
    pub parent: Option<u64>,
    /// When it would leave: 0 is the next victim; None of one that would not
    /// leave yet.
    pub turn: Option<usize>,
    /// What the policy says of it; None of one that is not resident.
    pub standing: Option<Standing>,
    /// Resident children that are not shown.
    pub more_children: usize,
}

/// What the policy says of a resident block.
#[derive(Clone, Copy, Debug)]
pub struct Standing {
    /// The number it goes by: the least leaves first.
    pub score: f64,
    /// Its place in the order.
    pub rank: Rank,
    /// Since it was moved last.
    pub age_ns: i64,
    /// Uses since it came.
    pub hits: u16,
    /// Resident blocks that continue it.
    pub children: u32,
    /// In which of the policy's lists it is.
    pub list: u8,
}

/// The picture.
#[derive(Clone, Debug)]
pub struct Explanation {
    /// The policy.
    pub policy: &'static str,
    /// Requests before it.
    pub requests: usize,
    /// Blocks resident.
    pub resident: usize,
    /// Blocks, parents before children.
    pub blocks: Vec<Shown>,
}

/// Looks at who would leave next, `victims` of them, and at the blocks around
/// the first: those it continues, and what else continues those.
pub fn explain(trace: &Trace, replay: &mut Replay, victims: usize) -> Result<Explanation> {
    let next = replay.preview(victims as u64)?;
    let turns: IdMap<usize> = next.iter().enumerate().map(|(turn, v)| (v.id, turn)).collect();
    let mut parents: IdMap<u64> = IdMap::default();
    let mut children: IdMap<Vec<u64>> = IdMap::default();
    for request in trace.requests().iter().take(replay.done()) {
        for pair in trace.blocks(request).windows(2) {
            if parents.insert(pair[1], pair[0]).is_none() {
                children.entry(pair[0]).or_default().push(pair[1]);
            }
        }
    }
    let mut order: Vec<u64> = Vec::new();
    let mut more: IdMap<usize> = IdMap::default();
    let mut at = next.first().map(|v| v.id);
    while let Some(id) = at {
        order.push(id);
        at = parents.get(&id).copied();
    }
    order.reverse();
    for id in order.clone() {
        let there = |c: &&u64| replay.evictor().objects().find(**c).is_some();
        let beside = children.get(&id).into_iter().flatten().filter(there);
        for (i, &child) in
            beside.filter(|c| !order.contains(c)).collect::<Vec<_>>().iter().enumerate()
        {
            match i < MAX_CHILDREN {
                true => order.push(*child),
                false => *more.entry(id).or_default() += 1,
            }
        }
    }
    for victim in &next {
        if !order.contains(&victim.id) {
            order.push(victim.id);
        }
    }
    let shown = |&id: &u64| Shown {
        id,
        parent: parents.get(&id).copied(),
        turn: turns.get(&id).copied(),
        standing: standing(replay, id),
        more_children: more.get(&id).copied().unwrap_or(0),
    };
    Ok(Explanation {
        policy: replay.evictor().name(),
        requests: replay.done(),
        resident: replay.evictor().objects().len(),
        blocks: order.iter().map(shown).collect(),
    })
}

fn standing(replay: &Replay<'_>, id: u64) -> Option<Standing> {
    let objects = replay.evictor().objects();
    let slot = objects.find(id)?;
    let (node, policy) = (objects.node(slot), replay.evictor().policy());
    Some(Standing {
        score: policy.score(objects, slot, replay.now()),
        rank: policy.rank(objects, slot, replay.now()),
        age_ns: (replay.now() - node.stamp).max(0),
        hits: node.hits,
        children: node.children,
        list: node.tag,
    })
}
