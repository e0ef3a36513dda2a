// chat, complete, batch. Each gives the exit status.
#pragma once

#include "engine.h"
#include "keeper.h"
#include "options.h"
#include "report.h"
#include "screen.h"

struct run {
    const options &o;
    engine &e;
    keeper &k;
    screen &out;
    report done;
};

int run_chat(run &r);
int run_complete(run &r);
int run_batch(run &r);
