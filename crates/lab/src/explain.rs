//! Explains a victim: the blocks resident around it, and their ranks in the policy's order.

use kvtier::base::status::Result;
use kvtier::policy::Rank;
use kvtier::trace::replay::Replay;
use kvtier::trace::requests::{IdMap, Trace};

/// Most children shown per block.
pub const MAX_CHILDREN: usize = 8;

/// A block of the explanation.
#[derive(Clone, Debug)]
pub struct ExplainedBlock {
    /// Its id.
    pub id: u64,
    /// Its parent.
    pub parent: Option<u64>,
    /// Position in the order of eviction: 0 is the next victim; None = not among the victims.
    pub turn: Option<usize>,
    /// The policy's view of the block; None = not resident.
    pub standing: Option<PolicyView>,
    /// Resident children that are not shown.
    pub more_children: usize,
}

/// A policy's view of a resident block.
#[derive(Clone, Copy, Debug)]
pub struct PolicyView {
    /// The score; the lowest is evicted first.
    pub score: f64,
    /// Its rank in the eviction order.
    pub rank: Rank,
    /// Time since its last move in the order.
    pub age_ns: i64,
    /// Uses since its insert.
    pub hits: u16,
    /// Number of resident children.
    pub children: u32,
    /// The policy's list that it is in.
    pub list: u8,
}

/// The explanation of one decision.
#[derive(Clone, Debug)]
pub struct Explanation {
    /// The policy's name.
    pub policy: &'static str,
    /// Requests replayed before.
    pub requests: usize,
    /// Number of resident blocks.
    pub resident: usize,
    /// The blocks, parents before children.
    pub blocks: Vec<ExplainedBlock>,
}

/// Previews the next `victims` victims, and collects the ancestors of the first one with their
/// resident children.
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
        let is_resident = |c: &&u64| replay.evictor().objects().find(**c).is_some();
        let beside = children.get(&id).into_iter().flatten().filter(is_resident);
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
    let shown = |&id: &u64| ExplainedBlock {
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

fn standing(replay: &Replay<'_>, id: u64) -> Option<PolicyView> {
    let objects = replay.evictor().objects();
    let slot = objects.find(id)?;
    let (node, policy) = (objects.node(slot), replay.evictor().policy());
    Some(PolicyView {
        score: policy.score(objects, slot, replay.now()),
        rank: policy.rank(objects, slot, replay.now()),
        age_ns: (replay.now() - node.stamp).max(0),
        hits: node.hits,
        children: node.children,
        list: node.tag,
    })
}
