//! Offloads in device memory: behaviour that equals that in host memory, and behaviour of devices
//! only.

use std::sync::atomic::Ordering;

use kvtier::base::clock::Clock;
use kvtier::base::op::OpOpts;
use kvtier::base::random::Random;
use kvtier::base::status::Status;
use kvtier::base::sync::Arc;
use kvtier::device::simulated::{Simulated, SimulatedOpts};
use kvtier::device::{Device, Event, Memory};
use kvtier::offload::BlockSelection;
use kvtier::sparse::{Context, Kind, Shape};
use kvtier::store::state::SessionOpts;
use kvtier::store::state::session::{LayerViews, Tokens};

use super::faulty::faulty;
use super::on_device::{self, DeviceBuffer, on_devices};
use super::{PlaneShape, World, decode_context, plane, shape};

on_devices! {
    super::loaded_rows_equal_put_rows => loaded_rows_equal_put_rows,
    super::blocks_on_disk_are_loaded => blocks_on_disk_are_loaded,
    super::quest_is_bit_identical_when_offloaded => quest_is_bit_identical_when_offloaded,
    super::prompt_larger_than_the_ring_is_computed_in_parts =>
        prompt_larger_than_the_ring_is_computed_in_parts,
    super::passes_load_every_layer_with_its_newest_token =>
        passes_load_every_layer_with_its_newest_token,
    super::fully_evicted_blocks_are_not_loaded => fully_evicted_blocks_are_not_loaded,
    super::invalid_offload_calls_change_nothing => invalid_offload_calls_change_nothing,
    super::missing_block_is_not_found => missing_block_is_not_found,
    super::block_summaries_are_stored_with_blocks => block_summaries_are_stored_with_blocks,
    super::key_norms_are_stored_with_blocks => key_norms_are_stored_with_blocks,
    super::audit::audit_counts_match_attention => audit_counts_match_attention,
    super::audit::audit_interval_is_obeyed => audit_interval_is_obeyed,
    super::audit::prefetched_layer_is_audited_by_its_own_query =>
        prefetched_layer_is_audited_by_its_own_query,
    super::cut::failed_truncate_changes_no_layer => failed_truncate_changes_no_layer,
    super::cut::truncate_without_the_store_fails_or_succeeds_whole =>
        truncate_without_the_store_fails_or_succeeds_whole,
    super::fork::forked_sequences_diverge => forked_sequences_diverge,
    super::fork::fork_inherits_evictions => fork_inherits_evictions,
    super::fork::fork_of_another_sequence_is_rejected => fork_of_another_sequence_is_rejected,
    super::fork::fork_shares_blocks_being_put => fork_shares_blocks_being_put,
}

/// The ring is in host memory, the tensors are in device memory.
#[test]
fn device_tensors_are_put_into_a_host_ring() {
    for device in [on_device::simulated(3) as Arc<dyn Device>, on_device::cuda()] {
        on_device::beside(device.clone(), super::loaded_rows_equal_put_rows);
        on_device::beside(device.clone(), super::passes_load_every_layer_with_its_newest_token);
        on_device::beside(device, super::fork::forked_sequences_diverge);
    }
}

/// Kernels read a buffer that its thread has released: the buffer is not written before they end.
#[test]
fn buffers_are_not_reused_while_kernels_read() {
    let slow = SimulatedOpts { latency_ns: 400_000, seed: 9, ..SimulatedOpts::default() };
    let slow = Arc::new(Simulated::new(Clock::real(), slow).expect("sound"));
    for device in [slow as Arc<dyn Device>, on_device::cuda()] {
        on_device::on(device.clone(), || {
            let shape = Shape { layers: 4, ..shape(Kind::Split) };
            let spec = "store(host=4MiB,copiers=1)";
            let mut world = World::with(83, shape, spec, ["", ""], (2, 256));
            world.put(90);
            for _ in 0..6 {
                let tokens = world.tokens(0) + 1;
                world.append(1);
                world.offload.begin(&decode_context(tokens)).expect("room");
                let mut reads: Vec<(u32, Vec<f32>, Event)> = Vec::new();
                for layer in 0..shape.layers {
                    world.put_as(layer as usize, 1, PlaneShape::Plain).expect("room");
                    let (buffer, loaded) = world.offload.take(layer, None).expect("loaded");
                    assert_eq!(loaded.tokens, tokens);
                    let views = world.offload.views(buffer).expect("loaded");
                    assert_eq!(views.k.memory, Memory::Device);
                    let Tokens::At(address) = views.k.place else { panic!("in one piece") };
                    let mut got = vec![0.0; (tokens * 16) as usize];
                    let event = on_device::read(&*device, address, &mut got);
                    world.offload.after(Some(event)).expect("an event");
                    world.offload.give_back(layer).expect("it was taken");
                    reads.push((layer, got, event));
                }
                world.offload.after(None).expect("none");
                for (layer, got, event) in reads {
                    on_device::end(&*device, event);
                    let positions: Vec<u32> = (0..tokens).collect();
                    assert!(got == world.right(layer as usize, &positions).0, "layer {layer}");
                }
            }
        });
    }
}

/// Blocks and the tail of another layer are loaded into a buffer only after a slow kernel has
/// read it. The store copies on another stream than the kernel's.
#[test]
fn loads_wait_for_the_kernel_that_reads_the_buffer() {
    for seed in 0..6 {
        let opts = SimulatedOpts { latency_ns: 3_000_000, seed, ..SimulatedOpts::default() };
        let device = Arc::new(Simulated::new(Clock::manual(1), opts).expect("sound"));
        on_device::on(device.clone(), || {
            let spec = "store(host=4MiB,copiers=1)";
            let mut world = World::with(89, shape(Kind::Split), spec, ["", ""], (1, 256));
            world.put(38);
            let context = decode_context(38);
            for next in [BlockSelection::Chosen(&[]), BlockSelection::Blocks(&[0, 1])] {
                world.offload.load(0, 0, BlockSelection::All, None, &context).expect("room");
                world.offload.wait(0).expect("loaded");
                let views = world.offload.views(0).expect("loaded");
                let Tokens::At(address) = views.k.place else { panic!("in one piece") };
                let mut got = vec![0.0; 38 * 16];
                let event = on_device::read(&*device, address, &mut got);
                world.offload.after(Some(event)).expect("an event");
                world.offload.done(0).expect("a buffer");
                world.offload.load(0, 1, next, None, &context).expect("room");
                world.offload.wait(0).expect("loaded");
                world.offload.after(None).expect("none");
                on_device::end(&*device, event);
                let positions: Vec<u32> = (0..38).collect();
                assert!(got == world.right(0, &positions).0, "{next:?}, seed {seed}");
                world.offload.done(0).expect("a buffer");
            }
        });
    }
}

/// Keys that a policy needs are copied to host memory: once at their put, and once more for
/// token-wise puts when the block is stored.
#[test]
fn keys_are_copied_to_the_host_for_policies() {
    let wanting = "quest(budget=32,page=8,dense=0)";
    for (decode, wants) in [("", false), ("h2o(sink=4,recent=20,budget=8)", false), (wanting, true)]
    {
        on_device::on(on_device::simulated(11), || {
            let mut world = World::open(5, Kind::Split, "store(host=4MiB)", decode);
            // All tensors are in device memory; with `put_as`, layers with `(first + layer) % 5 ==
            // 0` would not be.
            let (k_row, layers) = (2 * 8 * 4, 3u64);
            world.append(64);
            for layer in 0..3 {
                world.put_far(layer, 64);
            }
            let at_once = world.offload.stats().key_bytes;
            assert_eq!(at_once, if wants { layers * 64 * k_row } else { 0 });
            world.append(16);
            for _ in 0..16 {
                for layer in 0..3 {
                    world.put_far(layer, 1);
                }
            }
            let written = world.offload.stats().key_bytes - at_once;
            assert_eq!(written, if wants { layers * 32 * k_row } else { 0 });
            world.check_all();
        });
    }
}

impl World {
    /// Same as `put_as`, always from device memory.
    fn put_far(&mut self, layer: usize, tokens: u32) {
        let device = self.device.clone().expect("a device");
        let numbers = |random: &mut Random, count: u32| -> Vec<f32> {
            (0..count).map(|_| super::number(random)).collect()
        };
        let (k, v) =
            (numbers(&mut self.random, tokens * 16), numbers(&mut self.random, tokens * 12));
        let mut k_plane = plane(&k, tokens as usize, 2, 8, PlaneShape::Heads);
        let mut v_plane = plane(&v, tokens as usize, 2, 6, PlaneShape::Padded);
        on_device::end(&*device, k_plane.send(&device));
        on_device::end(&*device, v_plane.send(&device));
        let views = LayerViews { k: k_plane.view.clone(), v: Some(v_plane.view.clone()) };
        let (first, opts) = (self.tokens(layer), OpOpts::default());
        // SAFETY: the planes live until the op has ended.
        let op = unsafe { self.offload.put(layer as u32, first, tokens, &views, &opts) };
        if let Some(op) = op.expect("room") {
            op.wait(kvtier::base::op::RELEASED, 0).expect("the op ends");
            op.remove();
        }
        self.layers[layer].k.extend(k);
        self.layers[layer].v.extend(v);
    }
}

/// An unknown event is rejected. A failed event fails its dependents.
#[test]
fn invalid_and_failed_events_fail_their_dependents() {
    // The third batch fails. The first is the offload's check of its memory, the second belongs to
    // the test.
    let opts = SimulatedOpts { fail_at: vec![3], ..SimulatedOpts::default() };
    let device = Arc::new(Simulated::new(Clock::real(), opts).expect("sound"));
    on_device::on(device.clone(), || {
        let mut world = World::open(13, Kind::Split, "store(host=4MiB)", "");
        world.append(20);
        let status = world.offload.after(Some(Event(1 << 60))).map_err(|error| error.status());
        assert_eq!(status, Err(Status::Handle));
        let buffer = DeviceBuffer::new(&world.device.clone().expect("one"), 4096);
        let numbers = vec![1.0; 1024];
        let good = buffer.fill(&numbers);
        let bad = buffer.fill(&numbers);
        world.offload.after(Some(bad)).expect("under way");
        let (k, v) = (
            plane(&numbers, 20, 2, 8, PlaneShape::Plain),
            plane(&numbers, 20, 2, 6, PlaneShape::Plain),
        );
        let views = LayerViews { k: k.view.clone(), v: Some(v.view.clone()) };
        // SAFETY: the planes live until the end of the test.
        let put = unsafe { world.offload.put(0, 0, 20, &views, &OpOpts::default()) };
        assert_eq!(put.map(|_| ()).map_err(|error| error.status()), Err(Status::Io));
        assert_eq!(world.offload.tokens(0).expect("a layer"), (0, 0));
        let status = world.offload.after(Some(bad)).map_err(|error| error.status());
        assert_eq!(status, Err(Status::Io), "the event has failed");
        world.offload.after(None).expect("none");
        device.release(bad).expect("the event has ended");
        on_device::end(&*device, good);
        for layer in 0..3 {
            world.put_far(layer, 20);
        }
        world.check_all();
    });
}

/// Loads are submitted before the engine signals the event, and complete after it.
#[test]
fn loads_start_after_a_user_event() {
    let device: Arc<dyn Device> = on_device::simulated(23);
    on_device::on(device.clone(), || {
        let mut world = World::with(31, shape(Kind::Split), "store(host=4MiB)", ["", ""], (2, 256));
        world.put(70);
        let event = device.create_user_event().expect("a user event");
        world.offload.after(Some(event)).expect("an event");
        for buffer in 0..2 {
            let all = (BlockSelection::All, decode_context(70));
            world.offload.load(buffer, buffer, all.0, None, &all.1).expect("begun");
        }
        // Whole blocks are also put after the event.
        let numbers = vec![0.5; 32 * 16];
        world.append(26);
        world.offload.after(None).expect("none");
        for layer in 0..3 {
            world.put_as(layer, 10, PlaneShape::Plain).expect("own events");
        }
        world.offload.after(Some(event)).expect("an event");
        let buffer = DeviceBuffer::new(&device, 4 * 2 * 16 * 16);
        on_device::end(&*device, buffer.fill(&numbers));
        let mut views = plane(&numbers, 16, 2, 8, PlaneShape::Plain).view;
        (views.place, views.memory) = (Tokens::At(buffer.address()), Memory::Device);
        let v = plane(&numbers, 16, 2, 6, PlaneShape::Plain).view;
        let v = kvtier::store::state::session::PlaneView {
            place: Tokens::At(buffer.address()),
            memory: Memory::Device,
            ..v
        };
        let views = LayerViews { k: views, v: Some(v) };
        // SAFETY: the memory belongs to the test, and lives until the op has ended.
        let op = unsafe { world.offload.put(2, 80, 16, &views, &OpOpts::default()) };
        let op = op.expect("room").expect("a block");
        assert!(op.info().status.is_none(), "the op began before the event");
        device.signal_event(event).expect("a promise");
        op.wait(kvtier::base::op::RELEASED, 0).expect("the op ends");
        assert_eq!(op.info().status, Some(0));
        op.remove();
        world.offload.after(None).expect("none");
        for buffer in 0..2 {
            // The load has the tail as of this check.
            world.check(buffer, buffer as usize, 64..80);
            world.offload.done(buffer).expect("a buffer");
        }
        device.release(event).expect("the event has ended");
        world.layers[2].k.extend(&numbers[..16 * 16]);
        world.layers[2].v.extend(&numbers[..16 * 12]);
        world.check_all();
    });
}

/// A failed copy on the device changes nothing, and the same call succeeds later.
#[test]
fn failed_device_copy_fails_one_call() {
    let device = faulty(on_device::simulated(21));
    on_device::on(device.clone(), || {
        let policies = ["", "quest(budget=24,page=8,dense=0)"];
        let (spec, none) = ("store(host=4MiB,copiers=1)", shape(Kind::Split));
        let mut world = World::on(device.clone(), 19, none, spec, policies, (2, 256));
        world.put(21);
        for tokens in [1, 40] {
            world.append(tokens);
            let before = world.offload.tokens(1).expect("a layer");
            device.gather.store(1, Ordering::SeqCst);
            assert_eq!(world.put_as(1, tokens, PlaneShape::Plain), Err(Status::Io));
            assert_eq!(device.gather.load(Ordering::SeqCst), 0);
            assert_eq!(world.offload.tokens(1).expect("a layer"), before);
            for layer in 0..3 {
                world.put_as(layer, tokens, PlaneShape::Plain).expect("room");
            }
            world.check_all();
        }
        // The tail cannot be copied behind the blocks. The buffer is free, and can be loaded again.
        world.offload.load(0, 0, BlockSelection::All, None, &decode_context(62)).expect("room");
        device.gather.store(1, Ordering::SeqCst);
        let came = world.offload.wait(0).map(|_| ()).map_err(|error| error.status());
        assert_eq!(came, Err(Status::Io));
        world.check_all();
        // The tail cannot be copied for the fork. There is no fork, and this sequence is unchanged.
        let of = world.session;
        let other = world.store.with(|core| core.fork(of, &SessionOpts::default()));
        device.gather.store(2, Ordering::SeqCst);
        let fork = world.offload.fork(&world.store, other.expect("room"));
        assert_eq!(fork.map(|_| ()).map_err(|error| error.status()), Err(Status::Io));
        world.check_all();
    });
}

#[test]
fn lost_device_fails_calls_and_allows_close() {
    let device = on_device::simulated(17);
    on_device::on(device.clone(), || {
        let policies = ["", "quest(budget=24,page=8,dense=0)"];
        let spec = "store(host=4MiB)";
        let mut world = World::with(29, shape(Kind::Split), spec, policies, (2, 256));
        world.put(70);
        world.append(1);
        let context = decode_context(70);
        world.offload.load(1, 1, BlockSelection::All, None, &context).expect("room");
        device.lose();
        let gone = Err(Status::Unavailable);
        let status = |result: Result<(), kvtier::base::status::Error>| {
            result.map_err(|error| error.status())
        };
        // Copies that were under way may have completed before the loss.
        let _ = world.offload.wait(1);
        assert_eq!(world.put_as(0, 1, PlaneShape::Plain), gone);
        assert_eq!(world.offload.tokens(0).expect("a layer"), (64, 6));
        let loaded = world.offload.load(0, 0, BlockSelection::All, None, &context).map(|_| ());
        assert_eq!(
            loaded
                .map_err(|error| error.status())
                .and_then(|()| status(world.offload.wait(0).map(|_| ()))),
            gone
        );
        assert_eq!(status(world.offload.truncate(37)), gone);
        assert_eq!(world.offload.tokens(0).expect("a layer"), (64, 6));
        let of = world.session;
        let other = world.store.with(|core| core.fork(of, &SessionOpts::default()));
        let store = world.store.clone();
        assert_eq!(status(world.offload.fork(&store, other.expect("room")).map(|_| ())), gone);
        assert!(world.offload.evict(0, &Context { tokens: 70, ..context }).is_ok());
    });
    assert_eq!(device.allocated_bytes(), 0);
}
