//! Compares the layout of the C structs in Rust with the committed table of C compilers
//! (`ffi-tests/abi/layout.txt`, made by `layout.py`).

use std::collections::BTreeMap;
use std::mem::{align_of, offset_of, size_of};
use std::path::Path;

use kvtier::ffi::attention::*;
use kvtier::ffi::base::*;
use kvtier::ffi::device::*;
use kvtier::ffi::memory::*;
use kvtier::ffi::offload::*;
use kvtier::ffi::policy::*;
use kvtier::ffi::runtime::*;
use kvtier::ffi::session::*;
use kvtier::ffi::sparse::*;
use kvtier::ffi::store::*;
use kvtier::ffi::stream::*;
use kvtier::ffi::trace::*;

fn size_of_field<T, F>(_: impl Fn(&T) -> &F) -> usize {
    size_of::<F>()
}

macro_rules! layout {
    ($($name:ident { $($field:ident),* $(,)? })*) => {{
        let mut table = BTreeMap::new();
        $(
            table.insert(
                stringify!($name).to_string(),
                format!("{} {}", size_of::<$name>(), align_of::<$name>()),
            );
            $(
                table.insert(
                    format!("{}.{}", stringify!($name), stringify!($field)),
                    format!(
                        "{} {}",
                        offset_of!($name, $field),
                        size_of_field(|s: &$name| &s.$field)
                    ),
                );
            )*
        )*
        table
    }};
}

fn rust_table() -> BTreeMap<String, String> {
    layout! {
        kvt_error_info_t { struct_size, message, message_bytes, offset, status, os_errno }
        kvt_feature_t { struct_size, name, name_bytes, note, note_bytes, built, present }
        kvt_runtime_opts_t {
            struct_size, flags, workers, max_ops, name, name_bytes, faults, faults_bytes,
            on_thread, user_data, destroy,
        }
        kvt_close_report_t {
            struct_size, queues, buffers, budgets, accounts, ops, stores, namespaces, sessions,
            offloads, streamers, devices,
        }
        kvt_runtime_stats_t {
            struct_size, ops_submitted, ops_open, ops_live, ops_queued, ops_rejected, workers,
            poisoned,
        }
        kvt_op_info_t {
            struct_size, tag, bytes_done, state, status, items, items_done, items_failed,
            reserved, value,
        }
        kvt_op_item_t { value, status, done }
        kvt_completion_t {
            op, tag, bytes_done, value, status, events, items_failed, reserved,
        }
        kvt_queue_opts_t { struct_size, flags, capacity, callback, user_data, destroy }
        kvt_queue_stats_t { struct_size, capacity, pending, reserved, peak, posted, refused }
        kvt_budget_opts_t {
            struct_size, flags, device_bytes, host_bytes, disk_bytes, remote_bytes, pinned_bytes,
            reserve_bytes,
        }
        kvt_budget_report_t {
            struct_size, total_bytes, available_bytes, cgroup_limit_bytes, cgroup_headroom_bytes,
            effective_bytes, reserve_bytes, lock_quota_bytes, locked_bytes, accounts,
            cgroup_version, reserved,
        }
        kvt_tier_report_t {
            struct_size, asked_bytes, limit_bytes, reserved_bytes, committed_bytes, peak_bytes,
            free_bytes, refused, waiting, reclaim_requested_bytes,
        }
        kvt_account_opts_t {
            struct_size, flags, name, name_bytes, priority, reclaim, user_data, destroy,
        }
        kvt_submit_opts_t { struct_size, flags, queue, tag, deadline_ns, notify, priority }
        kvt_buffer_opts_t { struct_size, flags, bytes, align_bytes, account }
        kvt_buffer_info_t {
            struct_size, address, bytes, charged_bytes, in_flight, pinned, pages,
        }
        kvt_buffer_item_t {
            kind, flags, dst, dst_offset, src, src_offset, bytes, expect, tag,
        }
        kvt_policy_custom_t { struct_size, score, user_data, destroy }
        kvt_policy_predictor_t { struct_size, predict, user_data, destroy }
        kvt_policy_opts_t {
            struct_size, flags, spec, spec_bytes, max_objects, capacity_units, log_entries,
            remember, alpha, beta, custom, predictor,
        }
        kvt_policy_info_t { struct_size, name, name_bytes, about, about_bytes }
        kvt_policy_context_t {
            struct_size, flags, session, tenant, priority, length, max_length, tokens_each,
            reserved,
        }
        kvt_policy_object_t {
            id, parent, units, flags, next_use_ns, cost, context, tokens, layer, layers, chunk,
            chunks,
        }
        kvt_policy_hint_t { struct_size, flags, next_use_ns, confidence, stop, reserved }
        kvt_policy_victim_t { id, units }
        kvt_policy_outcome_t {
            struct_size, victims, freed_units, shortfall_units, decision_ns, decided_by,
            decided_by_bytes,
        }
        kvt_policy_columns_t {
            struct_size, rows, ids, blocks, created_ns, last_access_ns, count, priority, pinned,
            lifetime_ns, confidence, length, max_length, refs, tenant, cost, context, tokens,
            layer, layers, chunk, chunks, block_offsets, block_ids, block_refs, block_entries,
        }
        kvt_policy_pick_t { row, id, freed_blocks, kept_blocks, first_block }
        kvt_policy_selection_t {
            struct_size, victims, victim_capacity, stride_bytes, block_ids, block_capacity,
            victim_count, block_count, freed_blocks, shortfall_blocks, decision_ns, decided_by,
            decided_by_bytes,
        }
        kvt_policy_stats_t {
            struct_size, objects, max_objects, units, capacity_units, sessions, tenants, requests,
            references, hits, evicted_references, tokens, hit_tokens, cost, hit_cost, inserts,
            evictions, evicted_units, decisions, shortfalls, decisions_timed, decision_p50_ns,
            decision_p99_ns, decision_max_ns, decision_mean_ns, hit_ratio, token_hit_ratio,
            cost_hit_ratio, re_prefill_rate, jain_sessions, jain_tenants, bytes_per_object,
            next_log_number, name, name_bytes,
        }
        kvt_policy_log_entry_t {
            number, at_ns, id, session, stamp_ns, score, units, hits, queue, has_session, policy,
            reserved,
        }
        kvt_policy_advice_rules_t {
            struct_size, flags, shrink_above, grow_below, min_batch, max_batch, window, patience,
        }
        kvt_policy_advice_t { struct_size, batch, re_prefill_rate, evictions }
        kvt_trace_opts_t {
            struct_size, flags, path, path_bytes, kind, kind_bytes, block_tokens, seed, gap_ns,
            duration_ns, rate,
        }
        kvt_trace_info_t {
            struct_size, requests, references, blocks, block_tokens, sessions, duration_ns,
            tokens, known_tokens,
        }
        kvt_replay_opts_t {
            struct_size, flags, spec, spec_bytes, capacity_blocks, warm_up, layers, hints, alpha,
            progress, user_data,
        }
        kvt_replay_report_t {
            struct_size, requests, references, hits, tokens, hit_tokens, cost, hit_cost, inserts,
            evictions, re_prefill_rate, jain_sessions, jain_tenants, utilisation, decision_p50_ns,
            decision_p99_ns, decision_max_ns, run_ns,
        }
        kvt_store_opts_t {
            struct_size, flags, spec, spec_bytes, host_bytes, disk_bytes, disk_path,
            disk_path_bytes, policy, policy_bytes, disk_policy, disk_policy_bytes, write, reserved,
            device, secrets, secret_count, secret_stride_bytes, remote,
        }
        kvt_secret_t { name, name_bytes, secret, secret_bytes }
        kvt_remote_stats_t {
            struct_size, read_circuit, write_circuit, circuit_opens, looked_up_names, found_names, cached_names, fetched_objects, fetched_cells, fetched_bytes, wasted_bytes, absent_objects, corrupt_objects, late_requests, hung_requests, skipped_objects, uploaded_objects, uploaded_bytes, known_objects, failed_uploads, rejected_chunks, removed_objects,
        }
        kvt_remote_part_t { address, bytes }
        kvt_remote_item_t {
            name, name_bytes, parts, part_count, offset, bytes, status, reserved,
        }
        kvt_remote_custom_t {
            struct_size, flags, preferred_bytes, max_bytes, batch, reserved, get, put, exists,
            remove, user_data, destroy,
        }
        kvt_store_stats_t {
            struct_size, puts, gets, prefetches, stored_cells, known_cells, host_hit_cells, disk_hit_cells, device_hit_cells, missed_cells, corrupt_cells, damaged_copies, no_room_cells, written_cells, written_bytes, loaded_bytes, coded_cells, coded_raw_bytes, coded_bytes, lossy_numbers, lossy_error_max, lossy_error_mean, lossy_error_relative, demoted_chunks, dropped_chunks, evicted_chunks, evicted_parts, disk_full_chunks, failed_writes, failed_reads, admitted_chunks, admitted_bytes, rejected_never, rejected_hits, rejected_priority, rejected_size, rejected_wear, namespaces, layouts, sessions, tenants, chunks, pins, pinned_bytes, rejected_pins, expired_chunks, quota_evicted_chunks, quota_rejected_puts, transfers, transfer_cells, memory_waiters, memory_waiter_bytes, demoting_bytes, writeback_chunks, unwritten_bytes, unwritten_age_ns, sync_waiters, events, host_limit_bytes, host_used_bytes, host_cost_bytes, host_cells, host_slabs, disk_limit_bytes, disk_used_bytes, disk_peak_bytes, disk_live_bytes, disk_dead_bytes, disk_cells, disk_segments, disk_scratch_bytes, disk_appended_bytes, disk_compacted_bytes, disk_overhead_bytes, disk_read_bytes, disk_syncs, disk_failed_syncs, disk_compactions, disk_checkpoints, disk_rejected_appends, recovered_chunks, recovered_cells, recovered_unusable_cells, disk_engine, disk_direct, device_limit_bytes, device_used_bytes, device_live_bytes, device_cells, device_slabs, device_is_lost, device_promoted_cells, device_evicted_chunks, device_lost_cells,
        }
        kvt_latency_t { kind, reserved, count, mean_ns, p50_ns, p99_ns, max_ns }
        kvt_tenant_t {
            tenant, is_rest, put_bytes, got_bytes, hit_cells, missed_cells, rejected_puts, host_bytes,
            disk_bytes, host_quota_bytes, disk_quota_bytes,
        }
        kvt_media_t { token, digest }
        kvt_sequence_t {
            struct_size, tokens, token_count, media, media_count, media_stride_bytes,
        }
        kvt_identity_extra_t { tag, reserved, value, value_bytes }
        kvt_identity_t {
            struct_size, model, model_bytes, weights, weights_bytes, lora, lora_bytes, media,
            media_bytes, salt, salt_bytes, recipe, recipe_bytes, shard_index, shard_count, extra,
            extra_count, extra_stride_bytes, remote_tenant,
        }
        kvt_group_t {
            rule, dtype, kv_heads, window_tokens, k_bytes, v_bytes, state_bytes, layers,
            layer_count,
        }
        kvt_layout_t {
            struct_size, chunk_tokens, reserved, groups, group_count, stride_bytes, layers, dtype,
            kv_heads, window_tokens, full_every, full_first, k_bytes, v_bytes,
        }
        kvt_session_opts_t {
            struct_size, flags, name, name_bytes, tenant, priority, max_tokens, reserved,
            ttl_ns,
        }
        kvt_session_info_t { struct_size, tokens, full_chunks, chunk_tokens, layers }
        kvt_view_t {
            address, pages, page_count, shift_bytes, page_tokens, tokens, heads, memory, run_bytes,
            token_stride_bytes, head_stride_bytes,
        }
        kvt_transfer_t {
            struct_size, flags, first_token, tokens, first_layer, layers, k, v, stride_bytes, level,
            reserved, ready, chunks, chunk_count, after,
        }
        kvt_block_names_t { struct_size, bytes, ends, each_bytes, count }
        kvt_blocks_t {
            struct_size, flags, names, first_layer, layers, k, v, stride_bytes, level, reserved,
            ready, after,
        }
        kvt_attention_t {
            struct_size, layers, query_heads, key_heads, key_dim, value_dim, kind, block_tokens,
            max_tokens, scale, reserved,
        }
        kvt_sparse_context_t {
            struct_size, is_prefill, part, parts, first_query, tokens, reserved,
        }
        kvt_rows_t { struct_size, view, dtype, scaling, scales, scale_count }
        kvt_sparse_traits_t {
            struct_size, caps, needs, scope, granularity, flags, dense_layers, sum_queries, ahead,
            own_query_heads, own_key_heads, own_dim,
        }
        kvt_sparse_opts_t {
            struct_size, flags, attention, spec, spec_bytes, custom, account,
        }
        kvt_sparse_stats_t {
            struct_size, state_bytes, selections, candidates, chosen, spared, audited, wanted,
            found,
        }
        kvt_sparse_info_t { struct_size, name, name_bytes, about, about_bytes }
        kvt_sparse_custom_t {
            struct_size, traits, on_prefill_offload, on_decode_offload, select_blocks, index,
            sparse_prefill_attention, observe, evict, evicted, truncate, fork, user_data, destroy,
        }
        kvt_index_head_t { kind, first, lists, query_block, key_block, dense_from }
        kvt_index_t {
            struct_size, heads, head_capacity, head_count, starts, start_capacity, start_count, items,
            item_capacity, item_count,
        }
        kvt_token_lists_t {
            struct_size, starts, start_capacity, start_count, items, item_capacity, item_count,
        }
        kvt_attention_args_t {
            struct_size, queries, keys, values, select, first_query, first_key, scale, reserved,
        }
        kvt_block_placement_t {
            struct_size, blocks, block_count, block_tokens, tail_first, tail_tokens, reserved,
        }
        kvt_resident_tokens_t { struct_size, attention, kept, since, tokens }
        kvt_kernel_limits_t {
            struct_size, flags, queries, keys, tokens, query_heads, key_dim, value_dim,
        }
        kvt_attention_job_info_t {
            struct_size, steps, items, last_items, reserved, scratch_count, sum_keys,
        }
        kvt_offload_opts_t {
            struct_size, flags, session, attention, dtype, buffers, buffer_tokens, level, prefill,
            prefill_bytes, decode, decode_bytes, audit_every, reserved, prefill_custom, decode_custom,
            memory, memory_bytes,
        }
        kvt_offload_stats_t {
            struct_size, loads, selections, candidates, loaded_blocks, loaded_bytes, saved_bytes,
            failed_loads, put_blocks, put_bytes, tail_bytes, evicted_tokens, policy_bytes,
            load_waits, load_wait_ns, tail_waits, tail_wait_ns, cut_waits, cut_wait_ns,
            select_waits, select_wait_ns, audited, wanted, found, found_ppm, key_bytes,
        }
        kvt_offload_kv_t {
            struct_size, k, v, tokens, tail_tokens, blocks, buffer, memory, reserved,
        }
        kvt_range_t {
            first_token, tokens, state, tier, device_bytes, host_bytes, disk_bytes, remote_bytes,
            pending_bytes, load_ns,
        }
        kvt_lookup_t {
            struct_size, tokens, reusable_tokens, reusable_soon_tokens, device_bytes, host_bytes, disk_bytes,
            remote_bytes, pending_bytes, load_ns,
        }
        kvt_prefill_cost_t { struct_size, alpha_ns, beta_ns, observed, fixed, reserved }
        kvt_store_event_t {
            number, at_ns, kind, tier, tokens, position, key, parent, namespace_key,
        }
        kvt_plan_terms_t { struct_size, flags, alpha_ns, beta_ns, priority, reserved }
        kvt_plan_step_t {
            first_token, tokens, kind, tier, host_bytes, disk_bytes, remote_bytes, predicted_ns,
            device_bytes,
        }
        kvt_plan_t {
            struct_size, tokens, resident_tokens, load_tokens, recompute_tokens, total_ns, load_ns,
            compute_ns, without_ns,
        }
        kvt_clear_report_t { struct_size, removed_chunks, referenced_chunks, transferring_chunks }
        kvt_demote_report_t { struct_size, freed_chunks, pending_chunks, kept_chunks }
        kvt_str_t { text, bytes }
        kvt_model_info_t {
            struct_size, bytes, format, files, units, tensors, architecture, architecture_bytes,
            layers, hidden, heads, kv_heads, key_dim, value_dim, context, vocabulary, experts,
            experts_used, fingerprint,
        }
        kvt_model_file_t { struct_size, path, path_bytes, bytes }
        kvt_unit_t { struct_size, name, name_bytes, role, layer, expert, parts, bytes, image_bytes }
        kvt_tensor_t {
            struct_size, name, name_bytes, dtype, dtype_bytes, dims, dim_count, file, offset, bytes,
            parts, reserved,
        }
        kvt_part_t { tensor, unit, at, from, bytes }
        kvt_file_range_t { file, reserved, offset, bytes }
        kvt_unit_entry_t { name, name_bytes, role, layer, expert, reserved, ranges, range_count }
        kvt_model_table_t {
            struct_size, flags, paths, path_count, path_stride_bytes, units, unit_count,
            unit_stride_bytes, range_stride_bytes,
        }
        kvt_stream_terms_t {
            struct_size, flags, compute, mode, placement, slots, device_ceiling_bytes,
            host_ceiling_bytes, device_safety_bytes, host_reserve_bytes, context, sequences,
            kv_element_bytes, processor_layers, kv_bytes, workspace_bytes, hidden_bytes,
            expert_slots, reserved, staging_bytes, chunk_bytes, layer_compute_ns, disk_bytes_per_s,
            device_bytes_per_s, processor_bytes_per_s,
        }
        kvt_stream_memory_t {
            struct_size, device_free_bytes, host_free_bytes, host_total_bytes, lockable_bytes,
        }
        kvt_copy_rows_t {
            from, to, from_stride_bytes, to_stride_bytes, run_bytes, runs, from_memory, to_memory,
        }
        kvt_kernel_t {
            kind, dtype, other_dtype, scaling, queries, keys, values, out, index, counts, table,
            numbers, more, scales, scratch, scratch_bytes, query_stride, query_head_stride,
            key_stride, key_head_stride, value_stride, value_head_stride, out_stride,
            out_head_stride, query_count, query_heads, key_heads, key_dim, value_dim, page_tokens,
            tokens, first, count, keep, recent, sinks, scale, flags, reserved,
        }
        kvt_device_custom_t {
            struct_size, flags, streams, reserved, kernels, submit, query, wait, release, allocate,
            free, free_bytes, register_host, import_event, stream_wait, launch, user_data, destroy,
            create_event, signal_event,
        }
        kvt_device_opts_t {
            struct_size, flags, kind, ordinal, context, streams, stream_count, library,
            library_bytes, custom, memory_bytes, seed, latency_ns, bytes_per_s, arena, arena_bytes,
            peers, peer_count, cufile, cufile_bytes,
        }
        kvt_device_info_t { struct_size, flags, kind, streams, kernels, free_bytes }
        kvt_device_memory_t { struct_size, address, bytes, number, memory, reserved }
        kvt_copy_t { flags, view, plane, plane_memory, direction, first_token, tokens, sum }
        kvt_conformance_opts_t { struct_size, flags, seed, patience_ns, rounds, reserved }
        kvt_conformance_report_t { struct_size, passed, skipped, failed, reserved }
        kvt_stream_opts_t {
            struct_size, flags, model, terms, budget, priority, order, order_count, policy,
            policy_bytes, expert_policy, expert_policy_bytes, sidecar, sidecar_bytes, verify,
            readers, depth, marks, pinned_percent, reserved, device,
        }
        kvt_stream_plan_t {
            struct_size, compute, mode, device_units, host_units, file_units, slots, slot_bytes,
            expert_slots, reserved, expert_slot_bytes, staging_bytes, chunk_bytes, device_bytes,
            host_bytes, pinned_bytes,
        }
        kvt_forecast_t {
            struct_size, pass_ns, first_ns, bound_ns, compute_ns, device_ns, disk_ns, device_bytes,
            disk_bytes, tokens_per_s, binding, reserved,
        }
        kvt_unit_residency_t { residency, on_processor }
        kvt_unit_lease_t { struct_size, address, bytes, unit, memory, place, event, since_ns }
        kvt_stream_limits_t { struct_size, flags, host_bytes, device_bytes, context, reserved }
        kvt_stream_progress_t { struct_size, missing, resident_units, read_bytes }
        kvt_stream_stats_t {
            struct_size, passes, pass_ns, acquires, waited, wait_read_ns, wait_copy_ns,
            wait_slot_ns, use_ns, read_bytes, read_ns, read_ceiling_bytes_per_s, copied_bytes, copy_ns,
            copy_ceiling_bytes_per_s, wasted_bytes, failed, expert_hits, expert_misses, direct_bytes,
            direct_failed,
        }
        kvt_expert_stats_t { layer, reserved, hits, misses, bytes }
        kvt_stream_span_t { stage, unit, begin_ns, end_ns }
    }
}

/// The struct lines of the committed table: `name size align`, `name.field offset size`.
fn c_table() -> BTreeMap<String, String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("ffi-tests/abi/layout.txt");
    let text = std::fs::read_to_string(path).expect("ffi-tests/abi/layout.txt");
    text.lines()
        .filter(|line| line.starts_with("kvt_"))
        .filter_map(|line| line.split_once(' '))
        .map(|(name, rest)| (name.to_string(), rest.to_string()))
        .collect()
}

#[test]
fn struct_layouts_match_between_rust_and_c() {
    let (rust, c) = (rust_table(), c_table());
    assert!(c.len() > 100, "the table has {} lines only", c.len());
    for (name, layout) in &c {
        assert_eq!(rust.get(name), Some(layout), "{name}: C says {layout}");
    }
    assert_eq!(rust.len(), c.len(), "the header has fewer fields than this test names");
}
