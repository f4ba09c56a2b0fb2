// Checks one program: `check RANKS FAULTS PROGRAM [MUTATION]`; prints what is wrong, and the way to it, with exit
// code 1.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iterator>

#include "protocol.h"

namespace {

constexpr Kind all_reduce = Kind::all_reduce, reduce_scatter = Kind::reduce_scatter, all_gather = Kind::all_gather,
               broadcast = Kind::broadcast, make_empty = Kind::empty;
constexpr Mode inlined = Mode::inlined, direct = Mode::direct, staged = Mode::staged;

// On one array, or from one to the next. Without `fill` it takes what earlier operations leave there.
Op on(int array, Kind kind, Mode mode, int chunks = 1, int root = 0) {
  const bool in_place = kind == all_reduce || kind == broadcast || kind == make_empty;
  return {kind, mode, array, in_place ? array : array + 1, chunks, root, true};
}

Op then(Op op) {
  op.fill = false;
  return op;
}

// In the order of Mutation.
const char* const mutations[] = {"none",
                                 "entry_reused_early",
                                 "buffer_reused_early",
                                 "no_wait_for_copied_out",
                                 "no_wait_for_copied_in",
                                 "no_wait_for_reduced",
                                 "direct_leaves_early",
                                 "root_leaves_early",
                                 "posts_over_output",
                                 "posts_over_input",
                                 "refusal_read_late",
                                 "posted_before_written",
                                 "copied_in_before_copied",
                                 "wake_before_store",
                                 "no_wake",
                                 "wakes_one",
                                 "sleeper_not_counted",
                                 "sleeps_without_comparing",
                                 "sleeps_without_limit",
                                 "asks_no_lock",
                                 "counter_not_read_again",
                                 "closed_not_read_again",
                                 "record_given_up",
                                 "record_not_read_again",
                                 "record_valid_early",
                                 "two_buffers"};

std::vector<Program> programs() {
  const std::vector<std::string> at_once{"SS12", "SS21", "SS12"};
  const std::vector<std::string> eager{"SSS1S234", "S1SSS432", "SS1S2S34"};
  return {
      // The ring goes round, and one rank runs ahead as far as it may.
      {"inlined",
       {on(0, all_reduce, inlined), on(1, all_reduce, inlined), on(2, all_gather, inlined), on(0, all_reduce, inlined)},
       eager},
      {"direct",
       {on(0, all_reduce, direct), then(on(0, reduce_scatter, direct)), on(2, all_gather, direct)},
       {"SSS123", "S1SS32", "S1S2S3"}},
      {"broadcast",
       {on(0, broadcast, direct), on(1, broadcast, direct, 1, 1), on(0, all_reduce, direct)},
       {"SS1S23", "S1SS23", "S1S2S3"}},
      {"staged", {on(0, all_reduce, staged, 5)}, {"S1", "S1", "S1"}},
      {"staged_scatter", {on(0, reduce_scatter, staged, 4), on(2, all_reduce, inlined)}, at_once},
      {"staged_gather", {on(0, all_gather, staged, 4)}, {"S1", "S1", "S1"}},
      {"staged_broadcast", {on(0, broadcast, staged, 5, 1)}, {"S1", "S1", "S1"}},
      {"mixed",
       {on(0, all_reduce, staged, 2), on(1, all_reduce, direct), on(2, all_gather, staged, 2),
        on(0, all_reduce, inlined)},
       eager},
      // An operation on what an earlier one reads or writes.
      {"gather_then_reduce", {on(0, all_gather, staged), then(on(0, all_reduce, direct))}, at_once},
      {"scatter_then_reduce", {on(0, reduce_scatter, staged), then(on(0, all_reduce, direct))}, at_once},
      {"reduce_then_gather", {on(0, all_reduce, inlined), then(on(0, all_gather, inlined))}, at_once},
      {"empty",
       {on(0, make_empty, direct), on(1, all_reduce, inlined), on(2, all_reduce, inlined), on(0, make_empty, direct)},
       {"S1SS23S4", "S1SS23S4", "S1SS23S4"}},
      {"mismatch", {on(0, all_reduce, inlined), on(0, all_gather, staged)}, {"S1", "S1", "S1"}, true},
  };
}

}  // namespace

int main(int argc, char** argv) {
  const std::string first = argc > 1 ? argv[1] : "";
  if (first == "programs")
    for (const Program& program : programs()) std::printf("%s\n", program.name.c_str());
  if (first == "mutations")
    for (const char* mutation : mutations) std::printf("%s\n", mutation);
  if (argc < 4) return 0;
  const std::string mutated = argc > 4 ? argv[4] : "none";
  const auto* const found = std::find(std::begin(mutations), std::end(mutations), mutated);
  for (const Program& program : programs()) {
    if (program.name != argv[3] || found == std::end(mutations)) continue;
    const Protocol model(std::atoi(argv[1]), program, std::atoi(argv[2]), static_cast<Mutation>(found - mutations));
    return Explorer<Protocol>(model).run() ? 0 : 1;
  }
  std::fprintf(stderr, "no such program or mutation\n");
  return 2;
}
