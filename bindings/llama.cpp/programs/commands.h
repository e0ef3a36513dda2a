// The commands chat, complete and batch. Each returns the exit status.
#pragma once

#include "engine.h"
#include "kv_cache.h"
#include "options.h"
#include "report.h"
#include "screen.h"

struct run {
    const options &o;
    engine &e;
    kv_cache &cache;
    screen &out;
    report done;
};

int run_chat(run &r);
int run_complete(run &r);
int run_batch(run &r);
