// The kernel of chosen tokens: draws noise bits, and chooses tokens from rows of logits in memory.
//
// Plain C++ with the compiler's vector types, and no header of torch's, so that it compiles in a second. It
// follows speculative/choice.py: a token is given only where it is certain, within bounds on the noise and on
// sums, that the published rule gives the same token. All else is left to the caller (LEFT).

#include "philox.hpp"
#include "row_processing.hpp"
#include "row_sums.hpp"

#include <functional>

namespace {

constexpr int64_t LEFT = -1;       // the rule has to decide
constexpr int BLOCK = 4 * LANES;   // ids that are looked at together
constexpr int64_t STRETCH = 8 * BLOCK;  // ids whose highest logit is kept, to pass over them
constexpr int TRIES = 64;          // ids that cuts may drop before the row is left to the rule
constexpr int64_t MOST_TOP = 4096;  // largest top-k
constexpr int64_t SINGLE = 4;  // time of a block that is drawn by itself, in blocks that are drawn in a row
constexpr uint32_t LEADS = 1 << 16;
constexpr double SHARE = 0x1p-20;  // as weak_floors in digest.py
constexpr double ROUNDING = 1e-9;  // more than what the rule's own sums err by, as a share

struct Bounds {  // the least and the greatest noise by lead
  const double* low;
  const double* high;
};

struct Contender : Scored {
  double low;  // bounds of score + noise
  double high;
};

// One row whose token is sought.
class Search {
 public:
  // Where the row brings no leads, there is `room` for those of its width.
  Search(const Row& row, const Bounds& bounds, const Processed& processed, uint16_t* room)
      : row_(row),
        bounds_(bounds),
        processed_(processed),
        logits_(processed.logits()),
        leads_(row.leads),
        room_(room),
        noise_{row.seed},
        weak_high_(row.strong ? bounds.high[row.strong - 1] : -INF) {}

  int64_t token() {
    if (!(find_best() && std::isfinite(best_.score))) return LEFT;
    if (row_.temperature == 0) return best_.id;
    if (row_.top_k > 0 && row_.top_k < row_.width) return token_of_likeliest();
    draw();
    collect_strong();
    for (int tried = 0; tried < TRIES; ++tried) {
      Contender found;
      if (!winner(found)) return LEFT;
      const int kept = keep(found);
      if (kept > 0) return found.id;
      if (kept < 0) return LEFT;
      rejected_ = found;
      is_rejected_ = true;
    }
    return LEFT;
  }

 private:
  double score_of(int64_t id) const { return processed_.score_of(id); }

  // The id ranked first; false where a score is not a number.
  bool find_best() {
    bool broken = find_maxima();
    best_ = {row_.width, -INF};
    if (highest_ > -INF) {
      const int64_t first = first_of(highest_);
      best_ = {first, score_of(first)};
    }
    for (const Scored& one : processed_.changed()) {
      broken |= std::isnan(one.score);
      if (one.before(best_)) best_ = one;
    }
    return !broken;
  }

  // Finds the highest logit of every stretch of ids and of all; whether a logit is not a number.
  bool find_maxima() {
    Lanes bad = {};
    bool broken = false;
    maxima_.reserve(row_.width / STRETCH + 1);
    for (int64_t begin = 0; begin < row_.width; begin += STRETCH) {
      const int64_t end = std::min(begin + STRETCH, row_.width);
      Vec most = all(-std::numeric_limits<float>::infinity());
      int64_t id = begin;
      for (; id + LANES <= end; id += LANES) {
        const Vec x = load(logits_ + id);
        most = x > most ? x : most;
        bad |= x != x;
      }
      float highest = most[0];
      for (int lane = 1; lane < LANES; ++lane) highest = std::max(highest, most[lane]);
      for (; id < end; ++id) {
        broken |= std::isnan(logits_[id]);
        highest = std::max(highest, logits_[id]);
      }
      maxima_.push_back(highest);
      highest_ = std::max(highest_, highest);
    }
    return broken || any(bad);
  }

  int64_t first_of(float logit) const {
    int64_t id = STRETCH * (std::find(maxima_.begin(), maxima_.end(), logit) - maxima_.begin());
    while (id + LANES <= row_.width && !any(load(logits_ + id) == logit)) id += LANES;
    while (logits_[id] != logit) ++id;
    return id;
  }

  // Draws the leads of all ids, if the row brings none.
  void draw() {
    if (leads_ != nullptr) return;
    draw_leads(quickest_way(), noise_, row_.position, row_.width, room_);
    leads_ = room_;
  }

  uint16_t lead_of(int64_t id) const {
    return leads_ == nullptr ? noise_.lead(row_.position, (uint64_t)id) : leads_[id];
  }

  // Ids of strong noise; those that processing changes are among them, and never offered.
  void collect_strong() {
    const uint16_t least = (uint16_t)row_.strong;
    constexpr int STEP = 2 * LANES;
    int64_t id = 0;
    for (; id + 4 * STEP <= row_.width; id += 4 * STEP) {
      Leads reach[4], some = {};
      for (int part = 0; part < 4; ++part) {
        const Leads leads = *reinterpret_cast<const LooseLeads*>(leads_ + id + part * STEP);
        reach[part] = (Leads)(leads >= least);
        some |= reach[part];
      }
      if (!any(some)) continue;
      for (int part = 0; part < 4; ++part)
        if (any(reach[part])) collect(id + part * STEP, id + (part + 1) * STEP, least);
    }
    collect(id, row_.width, least);
  }

  void collect(int64_t begin, int64_t end, uint16_t least) {
    for (int64_t id = begin; id < end; ++id)
      if (leads_[id] >= least) strong_.push_back(id);
  }

  // Whether cuts may keep an id, as far as is known without sums.
  bool may_be_kept(const Scored& one) const {
    if (row_.min_p > 0 && std::exp(one.score - best_.score) < row_.min_p * (1 - ROUNDING)) return false;
    return !is_rejected_ || one.before(rejected_);
  }

  Contender bounded(const Scored& one) const {
    const uint16_t lead = lead_of(one.id);
    if (lead == LEADS - 1) return exactly(one);  // this lead bounds its noise from below alone
    return {one, one.score + bounds_.low[lead], one.score + bounds_.high[lead]};
  }

  // The score + noise of an id to within more than what two logarithms err by.
  Contender exactly(const Scored& one) const {
    uint64_t words[4];
    noise_.block((uint64_t)one.id / 4, row_.position, 1, words);
    const uint64_t bits = (uint64_t)lead_of(one.id) << 36 | words[one.id % 4] >> 28;
    const double noise = -std::log(-std::log(((double)bits + 0.5) * 0x1p-52));
    const double margin = 0x1p-46 * (1 + std::fabs(noise));
    return {one, one.score + (noise - margin), one.score + (noise + margin)};
  }

  // The id of greatest score + noise among those that may be kept; false where bounds do not tell.
  bool winner(Contender& found) {
    contenders_.clear();
    least_ = bounded(best_).low;
    for (const int64_t id : strong_) offer({id, score_of(id)});
    for (const Scored& one : processed_.changed()) offer(one);
    offer_weak();
    close();
    return sole(found);
  }

  // The only contender that could win once all their noise is known; false where there are several.
  bool sole(Contender& found) {
    double least = -INF;
    for (Contender& one : contenders_) {
      one = exactly(one);
      least = std::max(least, one.low);
    }
    int64_t count = 0;
    for (const Contender& one : contenders_)
      if (one.high >= least) found = one, ++count;
    return count == 1;
  }

  void offer(const Scored& one) {
    // Weak noise has one bound for all: most ids that processing changes need no look at the tables.
    if (one.score == -INF || (leads_[one.id] < row_.strong && one.score + weak_high_ < least_)) return;
    if (!may_be_kept(one)) return;
    const Contender known = bounded(one);
    if (known.high < least_) return;
    least_ = std::max(least_, known.low);
    contenders_.push_back(known);
  }

  // Ids of weak noise whose logits could suffice.
  void offer_weak() {
    if (weak_high_ == -INF) return;
    const double margin = least_ - weak_high_ - SHARE * (std::fabs(least_) + std::fabs(weak_high_));
    const double bound = (margin - SHARE * std::fabs(margin)) * row_.temperature;
    constexpr double most = std::numeric_limits<float>::max();
    const float floor = (float)std::min(std::max(bound, -most), most);
    if (!(floor <= highest_)) return;
    at_least(floor, [&](int64_t id) {
      if (leads_[id] < row_.strong) offer({id, score_of(id)});
    });
  }

  // Calls `with(id)` for each id whose logit reaches `level`, ascending.
  template <typename With>
  void at_least(float level, With with) const {
    for (size_t stretch = 0; stretch < maxima_.size(); ++stretch)
      if (maxima_[stretch] >= level) {
        const int64_t begin = STRETCH * (int64_t)stretch;
        at_least(level, begin, std::min(begin + STRETCH, row_.width), with);
      }
  }

  template <typename With>
  void at_least(float level, int64_t begin, int64_t end, With with) const {
    int64_t id = begin;
    for (; id + BLOCK <= end; id += BLOCK) {
      Lanes parts[BLOCK / LANES], some = {};
      for (int part = 0; part < BLOCK / LANES; ++part)
        some |= parts[part] = load(logits_ + id + part * LANES) >= level;
      if (!any(some)) continue;
      for (int part = 0; part < BLOCK / LANES; ++part)
        if (any(parts[part]))
          for (int64_t at = id + part * LANES; at < id + (part + 1) * LANES; ++at)
            if (logits_[at] >= level) with(at);
    }
    for (; id < end; ++id)
      if (logits_[id] >= level) with(id);
  }

  // Drops the contenders that cannot win.
  void close() {
    const auto beaten = [&](const Contender& one) { return one.high < least_; };
    contenders_.erase(std::remove_if(contenders_.begin(), contenders_.end(), beaten), contenders_.end());
  }

  // 1: top-p and min-p keep the id, 0: they drop it, -1: the bounds do not tell.
  int keep(const Scored& one) const {
    if (one.id == best_.id) return 1;
    int kept = 1;
    if (row_.min_p > 0) {
      const double weight = std::exp(one.score - best_.score);
      if (weight < row_.min_p * (1 - ROUNDING)) return 0;
      if (weight <= row_.min_p * (1 + ROUNDING)) kept = -1;
    }
    if (row_.top_p >= 1) return kept;
    const Sums sums = sums_before(one);
    const double over = sums.before - row_.top_p * sums.total;
    if (std::fabs(over) <= (2 * row_.error + ROUNDING) * sums.total) return -1;
    return over < 0 ? kept : 0;
  }

  // The token under top-k: its ids are found first. The other cuts, and noise, concern these alone.
  int64_t token_of_likeliest() {
    if (row_.top_k > MOST_TOP) return LEFT;
    if (SINGLE * row_.top_k > row_.width / IDS) draw();
    std::vector<Scored> found = likeliest(row_.top_k);
    const int64_t left = trimmed(found);
    contenders_.clear();
    least_ = -INF;
    for (int64_t place = 0; place < left; ++place) {
      contenders_.push_back(bounded(found[place]));
      least_ = std::max(least_, contenders_.back().low);
    }
    close();
    Contender chosen;
    return sole(chosen) ? chosen.id : LEFT;
  }

  // The first `count` ids by rank, in order where another cut follows, or all that are not dropped.
  std::vector<Scored> likeliest(int64_t count) const {
    std::vector<Scored> found;
    at_least(level_of(count), [&](int64_t id) {
      if (logits_[id] > -INF) found.push_back({id, score_of(id)});
    });
    for (const Scored& one : processed_.changed())
      if (one.score > -INF) found.push_back(one);
    const auto before = [](const Scored& one, const Scored& other) { return one.before(other); };
    if (count < (int64_t)found.size()) {
      std::nth_element(found.begin(), found.begin() + (count - 1), found.end(), before);
      found.resize(count);
    }
    if (row_.top_p < 1 || row_.min_p > 0) std::sort(found.begin(), found.end(), before);
    return found;
  }

  // A logit that at least `count` ids reach which processing leaves: that of maxima of groups of ids.
  //
  // A lane of `vectors` neighbouring vectors is a group. Four times as many groups as ids that are wanted
  // suffice for a level that only some fifteen per cent more than these reach.
  float level_of(int64_t count) const {
    const int64_t whole = row_.width / LANES;
    const int64_t vectors = std::max<int64_t>(1, whole * LANES / (4 * count)), rows = whole / vectors;
    if (rows * LANES < count) return -std::numeric_limits<float>::infinity();
    std::vector<float> maxima(rows * LANES);
    for (int64_t row = 0; row < rows; ++row) {
      const float* from = logits_ + row * vectors * LANES;
      Vec most = load(from);
      for (int64_t at = 1; at < vectors; ++at) {
        const Vec x = load(from + at * LANES);
        most = x > most ? x : most;
      }
      std::memcpy(maxima.data() + row * LANES, &most, sizeof most);
    }
    std::nth_element(maxima.begin(), maxima.begin() + (count - 1), maxima.end(), std::greater<float>());
    return maxima[count - 1];
  }

  // How many of the ids that top-k left, in order, top-p and min-p keep; LEFT where rounding decides.
  int64_t trimmed(const std::vector<Scored>& found) const {
    int64_t left = (int64_t)found.size();
    std::vector<double> weights;
    double total = 0;
    for (const Scored& one : found) {
      weights.push_back(std::exp(one.score - best_.score));
      total += weights.back();
    }
    if (row_.top_p < 1) {
      const double mass = row_.top_p * total;
      double sum = 0;
      for (int64_t place = 0; place < left; ++place) {
        sum += weights[place];
        if (std::fabs(sum - mass) <= ROUNDING * total) return LEFT;
        if (sum > mass) left = place + 1;
      }
    }
    for (int64_t place = 0; row_.min_p > 0 && place < left; ++place) {
      if (weights[place] < row_.min_p * (1 - ROUNDING)) return place;
      if (place && weights[place] <= row_.min_p * (1 + ROUNDING)) return LEFT;
    }
    return left;
  }

  // Sums of exp(score - best score) over all ids and over those ranked before one id.
  Sums sums_before(const Scored& one) const {
    const double score = one.score;
    float logit = logits_[one.id];
    bool equal = true;
    if (processed_.is_changed(one.id)) {
      // The greatest logit whose score is at most that of the id.
      constexpr double most = std::numeric_limits<float>::max();
      constexpr float inf = std::numeric_limits<float>::infinity();
      logit = (float)std::min(std::max(score * row_.temperature, -most), most);
      while ((double)logit / row_.temperature > score) logit = std::nextafter(logit, -inf);
      float above;
      while ((above = std::nextafter(logit, inf)) < inf && (double)above / row_.temperature <= score)
        logit = above;
      equal = (double)logit / row_.temperature == score;
    }
    Sums sums;
    if (highest_ > -INF) {
      const int64_t tied = equal ? one.id : 0;  // ids below this one are before it at the same logit
      const Weights weights = {logits_, highest_, row_.temperature};
      weights.add(0, tied, logit, true, sums);
      weights.add(tied, row_.width, logit, false, sums);
      const double scale = std::exp((double)highest_ / row_.temperature - best_.score);
      sums.total *= scale, sums.before *= scale;
    }
    for (const Scored& changed : processed_.changed()) {
      const double weight = std::exp(changed.score - best_.score);
      sums.total += weight;
      if (changed.before(one)) sums.before += weight;
    }
    return sums;
  }

  const Row& row_;
  const Bounds& bounds_;
  const Processed& processed_;
  const float* logits_;  // of ids that processing leaves as they are; -inf for all others
  const uint16_t* leads_;  // null: they are not drawn
  uint16_t* room_;
  Philox noise_;
  double weak_high_;
  float highest_ = -std::numeric_limits<float>::infinity();  // of logits_
  Scored best_ = {0, -INF};
  Scored rejected_ = {0, -INF};
  bool is_rejected_ = false;
  double least_ = -INF;  // a score + noise that an id reaches which may be kept
  std::vector<float> maxima_;  // of logits_, by stretch
  std::vector<int64_t> strong_;
  std::vector<Contender> contenders_;
};

// The token of a row, LEFT where the rule has to decide.
int64_t token_of(const Row& row, const Bounds& bounds) {
  static thread_local Processed processed;
  static thread_local std::vector<uint16_t> room;
  if (!processed.process(row)) return LEFT;
  if (row.leads == nullptr && row.temperature > 0 && (int64_t)room.size() < row.width) room.resize(row.width);
  return Search(row, bounds, processed, room.data()).token();
}

}  // namespace

extern "C" {

// How many ways there are to draw leading bits, and which of them is the quickest here.
int outrider_ways() { return WAYS; }
int outrider_quickest_way() { return quickest_way(); }

// Leading 16 bits of `count` ids, drawn in one of the ways.
void outrider_leads(int way, uint64_t seed, uint64_t position, int64_t count, uint16_t* out) {
  draw_leads((Way)way, {seed}, position, count, out);
}

// The token of each row, LEFT where the rule has to decide. `low` and `high` are lead_bounds().
void outrider_choose(const void* rows, int64_t count, const double* low, const double* high,
                     int64_t* tokens) {
  const Bounds bounds = {low, high};
  for (int64_t place = 0; place < count; ++place) {
    Row row;
    std::memcpy(&row, static_cast<const char*>(rows) + place * sizeof(Row), sizeof(Row));
    try {
      tokens[place] = token_of(row, bounds);
    } catch (...) {  // no memory: an exception that left C would end the process
      tokens[place] = LEFT;
    }
  }
}

}
