//! Sessions of coding agents, one a line: requests with times since the start of the session,
//! prefix ids local to the session, and nested sub-agents.
//!
//! Sessions have no absolute start: they start at random times with a mean gap, from a seed. Blocks
//! are joined to the requested size, and ids are mixed with the session's number. A sub-agent
//! counts as a session.

use crate::base::json::Json;
use crate::base::status::{Error, Result, Status};
use crate::fail;
use crate::io::source::Source;
use crate::meta::index;
use crate::meta::sessions::Stop;
use crate::trace::generate::rng::Rng;
use crate::trace::reader::ReadOpts;
use crate::trace::reader::mooncake::{push_id, time_ns};
use crate::trace::requests::{Builder, Request, Trace};

/// Default mean time between starts.
pub const GAP_NS: i64 = 120_000_000_000;
/// Deepest accepted nesting of agents.
const MAX_AGENT_DEPTH: u32 = 8;
/// Most requests of one line.
const MAX_SESSION_REQUESTS: usize = 1 << 20;

/// Reads a trace to the end of its source.
pub fn read(source: &mut Source, opts: &ReadOpts) -> Result<Trace> {
    let mut builder = Builder::new(opts.block_tokens)?;
    let mut rng = Rng::new(opts.seed);
    let gap_ns = if opts.gap_ns > 0 { opts.gap_ns } else { GAP_NS };
    let (mut line, mut start_ns, mut number) = (Vec::new(), 0i64, 0u64);
    while source.line(&mut line)? {
        number += 1;
        if line.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        let place = |e: Error| e.within(&format!("line {number}"));
        start_ns = start_ns.saturating_add(rng.wait_ns(gap_ns));
        if start_ns > opts.duration_ns {
            break;
        }
        let session = Session::parse(&line, number, opts.block_tokens).map_err(place)?;
        for (request, path) in session.requests {
            let at_ns = start_ns.saturating_add(request.at_ns);
            if at_ns <= opts.duration_ns {
                builder.push(Request { at_ns, ..request }, &path).map_err(place)?;
            }
        }
    }
    builder.finish()
}

struct Session {
    number: u64,
    agents: u64,
    each: usize,
    requests: Vec<(Request, Vec<u64>)>,
}

#[derive(Default)]
struct Row {
    at_s: f64,
    request: Request,
    /// Prefix ids of the line.
    local: Vec<u64>,
    /// A nested agent: its requests in the line.
    nested: bool,
}

impl Session {
    fn parse(line: &[u8], number: u64, block_tokens: u32) -> Result<Session> {
        let mut session = Session { number, agents: 0, each: 0, requests: Vec::new() };
        let mut json = Json::new(line);
        json.object(|json, key| match key {
            "block_size" => {
                let small = json.u32()?;
                if small == 0 || block_tokens % small != 0 || session.agents > 0 {
                    fail!(
                        Invalid,
                        "block_size is {small}: it must divide {block_tokens}, the tokens of a block, and \
                         stand before the requests"
                    );
                }
                session.each = (block_tokens / small) as usize;
                Ok(())
            }
            "requests" if session.each == 0 => fail!(Invalid, "requests before block_size"),
            "requests" => session.agent(json, 0.0, 0),
            _ => json.skip(),
        })?;
        json.end()?;
        Ok(session)
    }

    /// Reads the requests of one agent.
    fn agent(&mut self, json: &mut Json, start_s: f64, depth: u32) -> Result<()> {
        if depth > MAX_AGENT_DEPTH {
            fail!(Limit, "agents nested deeper than {MAX_AGENT_DEPTH}");
        }
        let id = index::hash(self.number << 20 | self.agents);
        self.agents += 1;
        let mut last: Option<usize> = None;
        json.array(|json| {
            let row = self.row(json, start_s, depth)?;
            if row.nested || row.local.is_empty() {
                return Ok(());
            }
            if self.requests.len() == MAX_SESSION_REQUESTS {
                fail!(Limit, "a session of more than {MAX_SESSION_REQUESTS} requests");
            }
            let at_ns = time_ns((start_s + row.at_s) * 1e9)?;
            if let Some(before) = last.and_then(|i| self.requests.get_mut(i)) {
                before.0.think_ns = (at_ns - before.0.at_ns).max(0);
            }
            last = Some(self.requests.len());
            let request = Request { at_ns, session: Some(id), ..row.request };
            let path = self.path(&row.local);
            self.requests.push((request, path));
            Ok(())
        })
    }

    /// The prefix id of the last small block in a large one stands for the large one.
    fn path(&self, local: &[u64]) -> Vec<u64> {
        let last = |group: &[u64]| group.last().copied().unwrap_or(0);
        let global = |id: u64| index::hash(id ^ index::hash(self.number));
        local.chunks(self.each).map(|group| global(last(group))).collect()
    }

    fn row(&mut self, json: &mut Json, start_s: f64, depth: u32) -> Result<Row> {
        let mut row = Row::default();
        row.request.priority = 1;
        let mut nested_before_time = false;
        let mut has_time = false;
        json.object(|json, key| {
            match key {
                "t" => {
                    row.at_s = json.f64()?;
                    has_time = true;
                }
                "in" => row.request.input_tokens = json.u32()?,
                "out" => row.request.output_tokens = json.u32()?,
                "hash_ids" => json.array(|json| push_id(&mut row.local, json.u64()?))?,
                "stop" if json.is_string() => row.request.stop = stop_of(&json.string()?),
                "requests" => {
                    nested_before_time = !has_time;
                    row.nested = true;
                    self.agent(json, start_s + row.at_s, depth + 1)?;
                }
                _ => json.skip()?,
            }
            Ok(())
        })?;
        if !has_time || nested_before_time {
            return Err(Error::new(
                Status::Invalid,
                "a request without t, or t after its requests",
            ));
        }
        Ok(row)
    }
}

fn stop_of(word: &str) -> Stop {
    match word {
        "tool_use" => Stop::ToolUse,
        "end_turn" | "stop_sequence" => Stop::EndTurn,
        "max_tokens" => Stop::Length,
        _ => Stop::Unknown,
    }
}
