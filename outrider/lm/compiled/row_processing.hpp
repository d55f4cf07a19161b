// A row of logits, what is asked of it, and the scores of the ids that processing changes.
//
// Processing follows speculative/sampling.py in float64 and in its order, so that scores have the rule's bits.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

constexpr int LANES = 16;  // floats of a vector; the compiler splits what is too wide
constexpr double INF = std::numeric_limits<double>::infinity();

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef float Loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Lanes __attribute__((vector_size(4 * LANES)));
typedef int64_t Wide __attribute__((vector_size(4 * LANES)));
typedef uint16_t Leads __attribute__((vector_size(4 * LANES)));
typedef uint16_t LooseLeads __attribute__((vector_size(4 * LANES), aligned(2), may_alias));

inline Vec load(const float* from) { return *reinterpret_cast<const Loose*>(from); }
inline Vec all(float value) { return Vec{} + value; }

template <typename Mask>
inline bool any(Mask mask) {
  Wide words = (Wide)mask;
  int64_t found = 0;
  for (int lane = 0; lane < LANES / 2; ++lane) found |= words[lane];
  return found != 0;
}

struct Ids {  // some ids, with a number for each where there is one
  const int64_t* ids;
  const double* numbers;
  int64_t count;
};

struct Row {  // as RowKernel packs it in row_kernel.py
  const float* logits;
  const uint16_t* leads;  // null: they are drawn here
  const uint8_t* allowed;  // null: all ids; else 1 for each id that a grammar allows
  int64_t width;
  uint64_t seed;
  uint64_t position;
  Ids biased;            // with the bias of each
  Ids seen;              // distinct ids before the tree, for the repetition penalty
  Ids generated;         // distinct ids of the output before the tree, with their counts
  Ids path;              // tokens of the tree down to the row, as they come
  Ids held;              // ids that end the request, where min_tokens holds them back
  double repetition;     // 1: no such penalty
  double presence;
  double frequency;
  double temperature;    // 0: greedy
  int64_t top_k;         // 0: no such cut
  double top_p;
  double min_p;
  double error;          // most by which a sum of exponentials errs, as a share
  int64_t strong;        // least lead of strong noise
};

struct Scored {
  int64_t id;
  double score;

  bool before(const Scored& other) const {
    return score > other.score || (score == other.score && id < other.id);
  }
};

// A row after processing: the logits of the ids that it leaves as they are, -inf for all others, and the
// scores of those that it changes. Lies in memory of the thread's own, which the next row reuses.
class Processed {
 public:
  // False where an id lies outside the row.
  bool process(const Row& row) {
    for (const Scored& one : changed_) places_[one.id] = 0;
    changed_.clear();
    marks_.clear();
    scale_ = row.temperature > 0 ? row.temperature : 1;
    logits_ = row.logits;
    const bool seen = row.repetition != 1, counted = row.presence != 0 || row.frequency != 0;
    if (!(row.allowed || row.biased.count || row.held.count || seen || counted)) return true;
    if ((int64_t)places_.size() < row.width) copied_.resize(row.width), places_.resize(row.width);
    if (!(bias(row) && (!seen || repeat(row)) && (!counted || count(row)) && hold(row))) return false;
    for (Scored& one : changed_) {
      if (row.allowed && !row.allowed[one.id]) one.score = -INF;
      one.score /= scale_;
    }
    copy(row);
    return true;
  }

  const float* logits() const { return logits_; }
  const std::vector<Scored>& changed() const { return changed_; }
  bool is_changed(int64_t id) const { return !changed_.empty() && places_[id]; }
  double score_of(int64_t id) const { return (double)logits_[id] / scale_; }

 private:
  struct Mark {
    double count = 0;
    bool seen = false, generated = false;
  };

  // Calls `with(place)` for each of some ids, which are changed from now on.
  template <typename With>
  bool each(const Row& row, const Ids& of, With with) {
    for (int64_t at = 0; at < of.count; ++at) {
      const int64_t id = of.ids[at];
      if (id < 0 || id >= row.width) return false;
      if (!places_[id]) {
        changed_.push_back({id, (double)row.logits[id]});
        marks_.emplace_back();
        places_[id] = (int32_t)changed_.size();
      }
      with(places_[id] - 1, at);
    }
    return true;
  }

  bool bias(const Row& row) {
    return each(row, row.biased, [&](int64_t at, int64_t of) { changed_[at].score += row.biased.numbers[of]; });
  }

  bool repeat(const Row& row) {
    const auto once = [&](int64_t at, int64_t) {
      if (marks_[at].seen) return;
      marks_[at].seen = true;
      double& score = changed_[at].score;
      score = score > 0 ? score / row.repetition : score * row.repetition;
    };
    return each(row, row.seen, once) && each(row, row.path, once);
  }

  bool count(const Row& row) {
    const auto known = [&](int64_t at, int64_t of) {
      marks_[at].generated = true;
      marks_[at].count += row.generated.numbers[of];
    };
    const auto one_more = [&](int64_t at, int64_t) {
      marks_[at].generated = true;
      marks_[at].count += 1;
    };
    if (!each(row, row.generated, known) || !each(row, row.path, one_more)) return false;
    for (size_t at = 0; at < changed_.size(); ++at) {
      if (!marks_[at].generated) continue;
      const double product = row.frequency * marks_[at].count;
      changed_[at].score = (changed_[at].score - row.presence) - product;
    }
    return true;
  }

  bool hold(const Row& row) {
    return each(row, row.held, [&](int64_t at, int64_t) { changed_[at].score = -INF; });
  }

  void copy(const Row& row) {
    constexpr float none = -std::numeric_limits<float>::infinity();
    float* to = copied_.data();
    if (row.allowed)
      for (int64_t id = 0; id < row.width; ++id) to[id] = row.allowed[id] ? row.logits[id] : none;
    else
      std::memcpy(to, row.logits, row.width * sizeof(float));
    for (const Scored& one : changed_) to[one.id] = none;
    logits_ = to;
  }

  const float* logits_ = nullptr;
  double scale_ = 1;
  std::vector<Scored> changed_;  // processed scores over the temperature, -INF where dropped
  std::vector<Mark> marks_;      // of each changed id
  std::vector<int32_t> places_;  // by id: its place in changed_ and one more, 0 where processing leaves it
  std::vector<float> copied_;
};

}  // namespace
