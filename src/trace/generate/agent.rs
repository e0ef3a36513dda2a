//! Coding agents: a task, tool calls in quick succession, sub-agents, and a user who reads the
//! result and continues.

use crate::base::status::Result;
use crate::meta::sessions::Stop;
use crate::trace::generate::rng::Rng;
use crate::trace::generate::sequence::Sequence;
use crate::trace::generate::{Maker, OUTPUT_TOKEN_NS, SECOND};
use crate::trace::requests::Request;

/// Context length in tokens at which a context is summarized.
const MAX_CONTEXT: u64 = 160_000;

pub(super) fn make(maker: &mut Maker) -> Result<()> {
    let prompts = maker.prompts(4, 14_000, 30_000);
    let helper = maker.prompts(1, 6_000, 10_000).remove(0);
    let mut rng = maker.rng.part(0);
    let mut start_ns = rng.wait_ns(maker.gap_ns);
    while start_ns <= maker.duration_ns {
        let own = rng.part(maker.next_session);
        let mut agent = Agent { rng: own, helper: &helper, at_ns: start_ns };
        let prompt = &prompts[agent.rng.zipf(prompts.len() as u64) as usize];
        agent.session(maker, prompt)?;
        start_ns = start_ns.saturating_add(rng.wait_ns(maker.gap_ns));
    }
    Ok(())
}

struct Agent<'a> {
    rng: Rng,
    /// The prompt that sub-agents begin with.
    helper: &'a Sequence,
    at_ns: i64,
}

impl Agent<'_> {
    fn session(&mut self, maker: &mut Maker, prompt: &Sequence) -> Result<()> {
        let session = maker.session();
        let mut context = prompt.clone();
        let tasks = self.rng.between(1, 6);
        for task in 1..=tasks {
            let question_tokens = self.rng.size(300, 1.0, 8_000);
            maker.grow(&mut context, question_tokens);
            let calls = self.rng.size(9, 0.9, 80);
            let pause_ns = match task == tasks {
                true => 0,
                false => 20 * SECOND + self.rng.wait_ns(240 * SECOND),
            };
            self.calls(maker, session, &mut context, calls, true, pause_ns)?;
            if context.tokens() > MAX_CONTEXT {
                context = prompt.clone();
                let summary = self.rng.size(3_000, 0.4, 8_000);
                maker.grow(&mut context, summary);
            }
            if self.at_ns > maker.duration_ns {
                break;
            }
        }
        Ok(())
    }

    /// A number of requests; all but the last end in a tool call. A pause follows the last one, if
    /// the session continues.
    fn calls(
        &mut self,
        maker: &mut Maker,
        session: u64,
        context: &mut Sequence,
        calls: u64,
        may_delegate: bool,
        pause_ns: i64,
    ) -> Result<()> {
        for call in 1..=calls {
            let last = call == calls;
            let output = self.rng.size(160, 0.8, 4_000);
            let began_ns = self.at_ns;
            let request = Request {
                at_ns: began_ns,
                session: Some(session),
                priority: 1,
                stop: if last { Stop::EndTurn } else { Stop::ToolUse },
                output_tokens: output as u32,
                ..Request::default()
            };
            let prompt_of_call = context.clone();
            self.at_ns += output as i64 * OUTPUT_TOKEN_NS;
            maker.grow(context, output);
            if last {
                self.at_ns = self.at_ns.saturating_add(pause_ns);
            } else if may_delegate && self.rng.chance(0.03) {
                self.delegate(maker)?;
                let answer = self.rng.size(800, 0.5, 4_000);
                maker.grow(context, answer);
            } else {
                self.at_ns += SECOND / 2 + self.rng.wait_ns(4 * SECOND);
                let result = self.rng.size(450, 1.2, 20_000);
                maker.grow(context, result);
            }
            let ends = last && pause_ns == 0;
            let think_ns = if ends { 0 } else { self.at_ns - began_ns };
            maker.request(Request { think_ns, ..request }, &prompt_of_call)?;
            if self.at_ns > maker.duration_ns {
                break;
            }
        }
        Ok(())
    }

    /// A sub-agent does a part of the task while the session waits.
    fn delegate(&mut self, maker: &mut Maker) -> Result<()> {
        let session = maker.session();
        let mut context = self.helper.clone();
        let task = self.rng.size(400, 0.6, 3_000);
        maker.grow(&mut context, task);
        let calls = self.rng.size(8, 0.7, 40);
        self.calls(maker, session, &mut context, calls, false, 0)
    }
}
