//! Checks of kernels: the results of each available kernel on small random inputs, against the
//! definitions of docs/internals/kernels.md computed in binary64 on the host.

mod attend;
mod heavy;
mod pages;
mod plain;

use crate::base::half::{from_bf16, from_f16, to_bf16, to_f16};
use crate::base::status::{Result, Status};
use crate::device::call::{Call, Kind};
use crate::device::conformance::bench::{Bench, TestBuffer};
use crate::device::conformance::{Check, NotPassed, Outcome, need, refused};
use crate::device::{Direction, Event, Memory, Stream};
use crate::meta::dtype::Dtype;

const fn check(name: &'static str, run: fn(&Bench<'_>) -> Outcome) -> Check {
    Check { name, run, closes: false, trusts: true }
}

/// All checks of kernels. They rely on copies, and no other check relies on them.
pub const CHECKS: [Check; 13] = [
    check("kernel-launches", launches),
    check("kernel-move", plain::moves),
    check("kernel-convert", plain::convert),
    check("kernel-sum", plain::sums),
    check("kernel-page-boxes", pages::boxes),
    check("kernel-page-scores", pages::scores),
    check("kernel-top", pages::top),
    check("kernel-add", heavy::add),
    check("kernel-keep", heavy::keep),
    check("kernel-compact", heavy::compact),
    check("kernel-estimate", attend::estimate),
    check("kernel-prefill", attend::prefill),
    check("kernel-decode", attend::decode),
];

/// Guard bytes after a kernel's output.
const EDGE: usize = 64;

/// Tools for kernels: memory that they can access.
struct Lab<'a> {
    bench: &'a Bench<'a>,
    place: Memory,
}

/// Output memory of a kernel, with guard bytes after it.
struct Out<'a> {
    buffer: TestBuffer<'a>,
    edge: Vec<u8>,
}

impl<'a> Lab<'a> {
    /// For a kernel, if the device has it.
    fn new(bench: &'a Bench<'a>, kind: Kind) -> Outcome<Lab<'a>> {
        let facts = bench.device.facts();
        if facts.kernels & kind.bit() == 0 {
            return Err(NotPassed::Skipped("the device does not have this kernel"));
        }
        let place = if facts.reaches_device { Memory::Device } else { Memory::Host };
        Ok(Lab { bench, place })
    }

    /// Number of random trials.
    fn rounds(&self) -> u64 {
        self.bench.rounds.div_ceil(8)
    }

    fn below(&self, n: u64) -> usize {
        self.bench.chance.below(n) as usize
    }

    /// Random numbers from -1 to 1, rounded to a type.
    fn numbers(&self, count: usize, dtype: Dtype) -> Vec<f32> {
        let one = |_| (self.bench.chance.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
        (0..count).map(one).map(|x| rounded(x, dtype)).collect()
    }

    /// Input memory.
    fn put(&self, bytes: &[u8]) -> Outcome<TestBuffer<'a>> {
        let buffer = TestBuffer::empty(self.bench, self.place, bytes.len().max(1))?;
        if !bytes.is_empty() {
            buffer.set(bytes)?;
        }
        Ok(buffer)
    }

    fn put_numbers(&self, numbers: &[f32], dtype: Dtype) -> Outcome<TestBuffer<'a>> {
        self.put(&bytes_of(numbers, dtype))
    }

    fn put_u32(&self, all: &[u32]) -> Outcome<TestBuffer<'a>> {
        self.put(&all.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<u8>>())
    }

    fn put_u64(&self, all: &[u64]) -> Outcome<TestBuffer<'a>> {
        self.put(&all.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<u8>>())
    }

    /// Output memory with random content.
    fn out(&self, bytes: usize) -> Outcome<Out<'a>> {
        self.change(&self.bench.chance.noise(bytes))
    }

    /// Memory that a kernel updates.
    fn change(&self, bytes: &[u8]) -> Outcome<Out<'a>> {
        let edge = self.bench.chance.noise(EDGE);
        let buffer = self.put(&[bytes, &edge].concat())?;
        Ok(Out { buffer, edge })
    }

    /// Submits kernels.
    fn launch(&self, stream: u32, after: Option<Event>, calls: &[Call]) -> Result<Event> {
        // SAFETY: buffers live until the work of a check has ended, or forever.
        unsafe { self.bench.device.launch(Stream(stream), after, calls) }
    }

    /// Executes one kernel.
    fn run(&self, call: Call) -> Outcome {
        self.try_run(call)?.then_some(()).ok_or_else(|| {
            NotPassed::Failed("a kernel in the device's set is rejected as unsupported".into())
        })
    }

    /// Executes one kernel; false if the device has the kernel but not for this call.
    fn try_run(&self, call: Call) -> Outcome<bool> {
        let event = match self.launch(0, None, &[call]) {
            Err(error) if error.status() == Status::Unsupported => return Ok(false),
            result => self.bench.begun("a kernel was rejected", result)?,
        };
        self.bench.finish(event)?;
        Ok(true)
    }
}

impl Out<'_> {
    fn at(&self) -> u64 {
        self.buffer.address
    }

    /// The content; the guard bytes must be unchanged.
    fn bytes(&self) -> Outcome<Vec<u8>> {
        let mut all = self.buffer.bytes()?;
        let edge = all.split_off(all.len() - EDGE);
        need(edge == self.edge, || "a kernel wrote past the end of its output".into())?;
        Ok(all)
    }

    fn numbers(&self, dtype: Dtype) -> Outcome<Vec<f32>> {
        Ok(numbers_of(&self.bytes()?, dtype))
    }

    fn u32s(&self) -> Outcome<Vec<u32>> {
        Ok(self.bytes()?.chunks_exact(4).map(word).collect())
    }

    fn u64s(&self) -> Outcome<Vec<u64>> {
        let long = |b: &[u8]| u64::from(word(&b[..4])) | u64::from(word(&b[4..])) << 32;
        Ok(self.bytes()?.chunks_exact(8).map(long).collect())
    }
}

fn word(bytes: &[u8]) -> u32 {
    u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

fn size(dtype: Dtype) -> usize {
    dtype.bits() as usize / 8
}

/// A number rounded to a type.
fn rounded(x: f32, dtype: Dtype) -> f32 {
    match dtype {
        Dtype::F16 => from_f16(to_f16(x)),
        Dtype::Bf16 => from_bf16(to_bf16(x)),
        _ => x,
    }
}

/// Numbers as F16, BF16 or F32 in memory.
fn bytes_of(numbers: &[f32], dtype: Dtype) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(numbers.len() * size(dtype));
    for &x in numbers {
        match dtype {
            Dtype::F16 => bytes.extend_from_slice(&to_f16(x).to_le_bytes()),
            Dtype::Bf16 => bytes.extend_from_slice(&to_bf16(x).to_le_bytes()),
            _ => bytes.extend_from_slice(&x.to_le_bytes()),
        }
    }
    bytes
}

fn numbers_of(bytes: &[u8], dtype: Dtype) -> Vec<f32> {
    let half = |b: &[u8]| u16::from_le_bytes([b[0], b[1]]);
    match dtype {
        Dtype::F16 => bytes.chunks_exact(2).map(|b| from_f16(half(b))).collect(),
        Dtype::Bf16 => bytes.chunks_exact(2).map(|b| from_bf16(half(b))).collect(),
        _ => bytes.chunks_exact(4).map(|b| f32::from_bits(word(b))).collect(),
    }
}

/// Compares a number with its expected value. `bound` is absolute up to 1, relative above.
fn check_close(what: &str, at: usize, got: f32, expected: f64, bound: f64) -> Outcome {
    let is_close = (f64::from(got) - expected).abs() <= bound * expected.abs().max(1.0);
    let is_same = f64::from(got) == expected;
    need(is_close || is_same, || format!("{what} {at} is {got}, and should be {expected}"))
}

/// Compares many numbers.
fn check_all_close(what: &str, got: &[f32], expected: &[f64], bound: f64) -> Outcome {
    need(got.len() >= expected.len(), || format!("{} {what} of {}", got.len(), expected.len()))?;
    let mut pairs = got.iter().zip(expected).enumerate();
    pairs.try_for_each(|(at, (&got, &expected))| check_close(what, at, got, expected, bound))
}

/// Unknown kernels and invalid streams are rejected, and kernels respect the event that they wait
/// for.
fn launches(bench: &Bench<'_>) -> Outcome {
    let facts = bench.device.facts();
    if facts.kernels == 0 {
        let lab = Lab { bench, place: Memory::Host };
        let result = lab.launch(0, None, &[Call { kind: Kind::Move as u32, ..Call::default() }]);
        refused("a kernel of a device that has none", result, Status::Unsupported)?;
        return Err(NotPassed::Skipped("the device has no kernels"));
    }
    let place = if facts.reaches_device { Memory::Device } else { Memory::Host };
    let lab = Lab { bench, place };
    let lacks = |kind: &&Kind| facts.kernels & kind.bit() == 0;
    let strange = [0, 999].into_iter().chain(Kind::ALL.iter().find(lacks).map(|kind| *kind as u32));
    for kind in strange {
        let result = lab.launch(0, None, &[Call { kind, ..Call::default() }]);
        refused(&format!("kernel {kind}"), result, Status::Unsupported)?;
    }
    refused("a kernel on no stream", lab.launch(facts.streams, None, &[]), Status::Invalid)?;
    let unknown = lab.launch(0, Some(Event(u64::MAX)), &[]);
    refused("kernels behind an unknown event", unknown, Status::Handle)?;
    for stream in 0..facts.streams {
        let event = bench.begun("an empty launch was rejected", lab.launch(stream, None, &[]))?;
        bench.finish(event)?;
    }
    if facts.kernels & Kind::Sum.bit() == 0 { Ok(()) } else { in_order(&lab, facts.streams) }
}

/// Copies bytes in, sums them, and copies the sum out, each on another stream.
fn in_order(lab: &Lab<'_>, streams: u32) -> Outcome {
    let bench = lab.bench;
    for _ in 0..lab.rounds() {
        let content = bench.chance.noise(300_000);
        let (host, back) =
            (bench.buffer(Memory::Host, content.len())?, bench.buffer(Memory::Host, 8)?);
        host.set(&content)?;
        let (source, sum) = (lab.put(&bench.chance.noise(content.len()))?, lab.put(&[7; 8])?);
        let table = lab.put_u64(&[source.address, content.len() as u64])?;
        let scratch = lab.put(&[7; 16 + 8 * 74])?;
        let call = Call {
            kind: Kind::Sum as u32,
            table: table.address,
            count: 1,
            out: sum.address,
            scratch: scratch.address,
            scratch_bytes: scratch.len as u64,
            ..Call::default()
        };
        let up = bench.begin(0, None, &mut [source.copy(&host, Direction::Scatter)?])?;
        let result = lab.launch(1 % streams, Some(up), &[call]);
        let summed = bench.begun("a kernel was rejected", result)?;
        let down =
            bench.begin(2 % streams, Some(summed), &mut [sum.copy(&back, Direction::Gather)?])?;
        [down, summed, up].into_iter().try_for_each(|event| bench.finish(event))?;
        let right = crate::base::checksum::checksum(&content).to_le_bytes();
        need(back.bytes()? == right, || "a kernel did not wait for its event".into())?;
    }
    Ok(())
}
