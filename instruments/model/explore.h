// Visits every state that a model can reach, in order of distance, and keeps them all: an answer is exact.
//
// A Model has a `State` without padding, `initial()`, `ended(state)`, and `successors(state, emit)`, which calls
// emit(next, rank, what) for every step that some rank can take, and throws Wrong where the state or a step breaks a
// property. From every state it must be possible to get to one that has ended: as there are finitely many, the only
// other way is to stand still for ever, or to go round in circles that can never be left.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

struct Wrong {
  std::string text;
};

template <typename Model>
class Explorer {
 public:
  using State = typename Model::State;

  explicit Explorer(const Model& model) : model_(model), slots_(1u << 16, none) {}

  // Whether all is well; if not, prints what is wrong after the shortest way to it.
  bool run() {
    visit(model_.initial(), 0);
    for (Index at = 0; at < states_.size(); ++at) {
      first_edge_.push_back(edges_.size());
      const State state = states_[at];
      int rank = -1;
      const char* what = "";
      try {
        model_.successors(state, [&](const State& next, int r, const char* w) {
          rank = r;
          what = w;
          edges_.push_back(visit(next, at));
        });
      } catch (const Wrong& wrong) {
        return report(wrong.text, at);
      }
    }
    first_edge_.push_back(edges_.size());
    if (const Index stuck = first_stuck(); stuck != none) return report("no way on to an end", stuck);
    return true;
  }

  std::size_t states() const { return states_.size(); }
  std::size_t steps() const { return edges_.size(); }

 private:
  using Index = std::uint32_t;
  static constexpr Index none = UINT32_MAX;

  static std::uint64_t hash(const State& state) {
    std::uint64_t hash = 0xcbf29ce484222325;
    const auto* bytes = reinterpret_cast<const unsigned char*>(&state);
    std::size_t i = 0;
    for (std::uint64_t word; i + 8 <= sizeof(State); i += 8) {
      std::memcpy(&word, bytes + i, 8);
      hash = (hash ^ word) * 0x9e3779b97f4a7c15;
      hash ^= hash >> 32;
    }
    for (; i < sizeof(State); ++i) hash = (hash ^ bytes[i]) * 0x100000001b3;
    return hash ^ (hash >> 29);
  }

  // The number of a state, new or known.
  Index visit(const State& state, Index parent) {
    if (states_.size() * 2 >= slots_.size()) grow();
    Index& slot = find(state);
    if (slot == none) {
      slot = static_cast<Index>(states_.size());
      states_.push_back(state);
      parents_.push_back(parent);
    }
    return slot;
  }

  Index& find(const State& state) {
    std::size_t at = hash(state) & (slots_.size() - 1);
    while (slots_[at] != none && std::memcmp(&states_[slots_[at]], &state, sizeof(State)) != 0)
      at = (at + 1) & (slots_.size() - 1);
    return slots_[at];
  }

  void grow() {
    slots_.assign(slots_.size() * 2, none);
    for (Index i = 0; i < states_.size(); ++i) find(states_[i]) = i;
  }

  // The first state from which no end can be reached.
  Index first_stuck() const {
    std::vector<bool> good(states_.size());
    for (bool changed = true; changed;) {
      changed = false;
      for (Index at = static_cast<Index>(states_.size()); at-- > 0;) {
        if (good[at]) continue;
        bool leads = model_.ended(states_[at]);
        for (std::size_t e = first_edge_[at]; !leads && e < first_edge_[at + 1]; ++e) leads = good[edges_[e]];
        if (leads) good[at] = changed = true;
      }
    }
    const auto bad = std::find(good.begin(), good.end(), false);
    return bad == good.end() ? none : static_cast<Index>(bad - good.begin());
  }

  bool report(const std::string& wrong, Index at) {
    std::vector<Index> path{at};
    while (path.back() != 0) path.push_back(parents_[path.back()]);
    for (std::size_t i = path.size(); --i > 0;) {
      bool told = false;
      try {
        model_.successors(states_[path[i]], [&](const State& next, int rank, const char* what) {
          if (told || std::memcmp(&next, &states_[path[i - 1]], sizeof(State)) != 0) return;
          std::printf("  rank %d: %s\n", rank, what);
          told = true;
        });
      } catch (const Wrong&) {  // of a step that was not taken
      }
    }
    std::printf("WRONG after %zu steps: %s\n", path.size() - 1, wrong.c_str());
    return false;
  }

  const Model& model_;
  std::vector<State> states_;
  std::vector<Index> parents_;
  std::vector<Index> slots_;  // of a hash table with open addresses
  std::vector<Index> edges_;
  std::vector<std::size_t> first_edge_;
};
