/* Eight numbers of a key or value, raw and as f32, for kernels that compute in f32. They are loaded
 * long before their use; the raw form takes fewer registers. */
#pragma once

#include "device.h"

struct is_f32 {
    static constexpr u32 BYTES = 4;
    struct raw {
        quad low, high;
    };
    DEVICE raw load(u64 from) {
        return {load16((const void *)from), load16((const void *)(from + 16))};
    }
    DEVICE float number(const raw &all, u32 i) {
        const quad &half = i < 4 ? all.low : all.high;
        const u32 words[4] = {half.x, half.y, half.z, half.w};
        return from_bits(words[i % 4]);
    }
};

struct is_f16 {
    static constexpr u32 BYTES = 2;
    typedef quad raw;
    DEVICE raw load(u64 from) { return load16((const void *)from); }
    DEVICE float number(const raw &all, u32 i) {
        const u32 words[4] = {all.x, all.y, all.z, all.w};
        return i % 2 ? high_f16(words[i / 2]) : low_f16(words[i / 2]);
    }
};

struct is_bf16 {
    static constexpr u32 BYTES = 2;
    typedef quad raw;
    DEVICE raw load(u64 from) { return load16((const void *)from); }
    DEVICE float number(const raw &all, u32 i) {
        const u32 words[4] = {all.x, all.y, all.z, all.w};
        return i % 2 ? high_bf16(words[i / 2]) : low_bf16(words[i / 2]);
    }
};

struct is_i8 {
    static constexpr u32 BYTES = 1;
    typedef pair raw;
    DEVICE raw load(u64 from) { return *(const pair *)from; }
    DEVICE float number(const raw &all, u32 i) {
        u32 word = i < 4 ? all.x : all.y;
        return (float)(signed char)(word >> i % 4 * 8 & 255);
    }
};
