// Checks one program: `check RANKS FAULTS PROGRAM [MUTATION]`; prints what is wrong, and the way to it, with exit
// code 1.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <sstream>

#include "messages.h"
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

#define TEXT(...) #__VA_ARGS__
#define TEXT_OF(...) TEXT(__VA_ARGS__)

std::vector<std::string> mutations() {
  std::vector<std::string> names;
  std::istringstream list(TEXT_OF(MUTATIONS));
  for (std::string name; std::getline(list >> std::ws, name, ',');) names.push_back(name);
  return names;
}

// Every operation with every other one after it, on the same arrays in each way: two in place, one that reads what the
// other writes, writes what it reads ...
std::vector<Program> pairs() {
  std::vector<Program> result;
  const auto each = [](auto body) {
    for (Kind kind : {all_reduce, reduce_scatter, all_gather, broadcast})
      for (Mode mode : {inlined, direct, staged}) body(on(0, kind, mode, mode == staged ? 2 : 1));
  };
  each([&](const Op& a) {
    each([&](Op b) {
      const bool in_place = b.in == b.out;
      b.fill = false;
      for (b.in = 0; b.in < 3; ++b.in)
        for (b.out = 0; b.out < 3; ++b.out)
          if (in_place == (b.in == b.out)) result.push_back({"pairs", {a, b}, {"SS12", "SS21", "SS12"}});
    });
  });
  return result;
}

std::vector<Program> chosen_programs() {
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

std::vector<Program> programs() {
  std::vector<Program> all = chosen_programs();
  for (Program& pair : pairs()) all.push_back(std::move(pair));
  return all;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  if (what == "programs") {
    for (const Program& program : chosen_programs()) std::printf("%s\n", program.name.c_str());
    std::printf("messages\npairs\n");
    return 0;
  }
  if (what == "mutations") {
    for (const std::string& mutation : mutations()) std::printf("%s\n", mutation.c_str());
    return 0;
  }
  const std::string mutated = argc > 4 ? argv[4] : "none";
  const std::vector<std::string> names = mutations();
  const auto mutation = std::find(names.begin(), names.end(), mutated);
  std::size_t states = 0;
  std::size_t steps = 0;
  const auto explore = [&](const auto& model) {
    Explorer explorer(model);
    if (!explorer.run()) return false;
    states += explorer.states();
    steps += explorer.steps();
    return true;
  };
  const bool messages = argc > 3 && std::string(argv[3]) == "messages" && mutation != names.end();
  for (int mismatched = -1; messages && mismatched < MessageProtocol::messages; ++mismatched)
    if (!explore(MessageProtocol(mismatched, static_cast<Mutation>(mutation - names.begin())))) return 1;
  for (const Program& program : programs()) {
    if (argc < 4 || program.name != argv[3] || mutation == names.end()) continue;
    const auto mutated_as = static_cast<Mutation>(mutation - names.begin());
    if (!explore(Protocol(std::atoi(argv[1]), program, std::atoi(argv[2]), mutated_as))) return 1;
  }
  std::printf("%zu states, %zu steps\n", states, steps);
  return states == 0 ? 2 : 0;
}
