// The kernel of sampled tokens: draws noise bits, and chooses tokens from rows of logits in memory.
//
// Plain C++ with the compiler's vector types, and no header of torch's, so that it compiles in a second. It
// follows speculative/choice.py: a token is given only where it is certain, within bounds on the noise and on
// sums, that the published rule gives the same token. All else is left to the caller (LEFT).

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "leads are copied as they lie in memory");

namespace {

constexpr int64_t LEFT = -1;       // the rule has to decide
constexpr int LANES = 16;          // floats of a vector; the compiler splits what is too wide
constexpr int BLOCK = 4 * LANES;   // ids that are looked at together
constexpr int TRIES = 64;          // ids that cuts may drop before the row is left to the rule
constexpr int64_t MOST_TOP = 4096;  // largest top-k
constexpr uint32_t LEADS = 1 << 16;
constexpr double INF = std::numeric_limits<double>::infinity();
constexpr double SHARE = 0x1p-20;  // as weak_floors in digest.py
constexpr double ROUNDING = 1e-9;  // more than what the rule's own sums err by, as a share

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

// Philox4x64-10 under one key; as speculative/noise.py.
struct Philox {
  uint64_t seed;

  void block(uint64_t first, uint64_t position, uint64_t part, uint64_t out[4]) const {
    uint64_t a = first, b = position, c = part, d = 0;
    uint64_t one = seed, other = 0x746F6B656E730002;
    for (int round = 0; round < 10; ++round) {
      const auto x = (unsigned __int128)a * 0xD2E7470EE14C6C93;
      const auto z = (unsigned __int128)c * 0xCA5A826395121157;
      a = (uint64_t)(z >> 64) ^ b ^ one;
      b = (uint64_t)z;
      c = (uint64_t)(x >> 64) ^ d ^ other;
      d = (uint64_t)x;
      one += 0x9E3779B97F4A7C15;
      other += 0xBB67AE8584CAA73B;
    }
    out[0] = a, out[1] = b, out[2] = c, out[3] = d;
  }
};

struct Row {  // as RowKernel packs it in row_kernel.py
  const float* logits;
  const uint16_t* leads;
  int64_t width;
  uint64_t seed;
  uint64_t position;
  const int64_t* named;  // ids that processing changes, ascending
  const double* named_scores;
  int64_t named_count;
  int64_t top_k;         // 0: no such cut
  double temperature;
  double top_p;
  double min_p;
  double error;          // most by which a sum of exponentials errs, as a share
  int64_t strong;        // least lead of strong noise
};

struct Bounds {  // the least and the greatest noise by lead
  const double* low;
  const double* high;
};

struct Scored {
  int64_t id;
  double score;

  bool before(const Scored& other) const {
    return score > other.score || (score == other.score && id < other.id);
  }
};

struct Contender : Scored {
  double low;  // bounds of score + noise
  double high;
};

struct Sums {
  double total = 0, before = 0;
};

// exp for arguments up to 0, within two units of float32's rounding; 0 below -87.
inline Vec exponential(Vec x) {
  const Lanes tiny = x < -87.0f;
  x = tiny ? all(-87.0f) : x;
  // Adding and subtracting 1.5 * 2**23 rounds to the nearest whole number.
  const Vec whole = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
  const Vec rest = (x - whole * 0.693359375f) - whole * -2.12194440e-4f;
  Vec sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  sum = sum * (rest * rest) + rest + 1.0f;
  const Lanes power = (__builtin_convertvector(whole, Lanes) + 127) << 23;
  return tiny ? Vec{} : sum * (Vec)power;
}

inline double lanes_sum(Vec values) {
  double sum = 0;
  for (int lane = 0; lane < LANES; ++lane) sum += values[lane];
  return sum;
}

// One row whose token is sought.
class Search {
 public:
  Search(const Row& row, const Bounds& bounds)
      : row_(row),
        bounds_(bounds),
        noise_{row.seed},
        weak_high_(row.strong ? bounds.high[row.strong - 1] : -INF) {}

  int64_t token() {
    if (!(find_best() && std::isfinite(best_.score))) return LEFT;
    if (row_.top_k > 0 && row_.top_k < row_.width) return token_of_likeliest();
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
  // Calls `with(begin, end)` for every run of ids that processing does not change.
  template <typename With>
  void runs(With with) const {
    int64_t begin = 0;
    for (int64_t place = 0; place < row_.named_count; ++place) {
      if (row_.named[place] > begin) with(begin, row_.named[place]);
      begin = row_.named[place] + 1;
    }
    if (row_.width > begin) with(begin, row_.width);
  }

  double score_of(int64_t id) const { return (double)row_.logits[id] / row_.temperature; }

  // The id ranked first; false where a score is not a number.
  bool find_best() {
    float highest = -std::numeric_limits<float>::infinity();
    bool broken = false;
    runs([&](int64_t begin, int64_t end) {
      Vec most = all(highest);
      Lanes bad = {};
      int64_t id = begin;
      for (; id + LANES <= end; id += LANES) {
        const Vec x = load(row_.logits + id);
        most = x > most ? x : most;
        bad |= x != x;
      }
      broken |= any(bad);
      for (int lane = 0; lane < LANES; ++lane) highest = std::max(highest, most[lane]);
      for (; id < end; ++id) {
        broken |= std::isnan(row_.logits[id]);
        highest = std::max(highest, row_.logits[id]);
      }
    });
    highest_ = highest;
    best_ = {row_.width, -INF};
    if (highest > -INF) best_ = {first_of(highest), (double)highest / row_.temperature};
    for (int64_t place = 0; place < row_.named_count; ++place) {
      const Scored named = {row_.named[place], row_.named_scores[place]};
      broken |= std::isnan(named.score);
      if (named.before(best_)) best_ = named;
    }
    return !broken;
  }

  int64_t first_of(float logit) const {
    int64_t found = -1;
    runs([&](int64_t begin, int64_t end) {
      int64_t id = begin;
      if (found >= 0) return;
      for (; id + LANES <= end && !any(load(row_.logits + id) == logit); id += LANES) {
      }
      for (; id < end; ++id)
        if (row_.logits[id] == logit) {
          found = id;
          return;
        }
    });
    return found;
  }

  // Ids of strong noise among those that processing does not change.
  void collect_strong() {
    const uint16_t least = (uint16_t)row_.strong;
    constexpr int STEP = 2 * LANES;
    runs([&](int64_t begin, int64_t end) {
      int64_t id = begin;
      for (; id + 4 * STEP <= end; id += 4 * STEP) {
        Leads reach[4], some = {};
        for (int part = 0; part < 4; ++part) {
          const Leads leads = *reinterpret_cast<const LooseLeads*>(row_.leads + id + part * STEP);
          reach[part] = (Leads)(leads >= least);
          some |= reach[part];
        }
        if (!any(some)) continue;
        for (int part = 0; part < 4; ++part)
          if (any(reach[part])) collect(id + part * STEP, id + (part + 1) * STEP, least);
      }
      collect(id, end, least);
    });
  }

  void collect(int64_t begin, int64_t end, uint16_t least) {
    for (int64_t id = begin; id < end; ++id)
      if (row_.leads[id] >= least) strong_.push_back(id);
  }

  // Whether cuts may keep an id, as far as is known without sums.
  bool may_be_kept(const Scored& one) const {
    if (row_.min_p > 0 && std::exp(one.score - best_.score) < row_.min_p * (1 - ROUNDING)) return false;
    return !is_rejected_ || one.before(rejected_);
  }

  Contender bounded(const Scored& one) const {
    const uint16_t lead = row_.leads[one.id];
    if (lead == LEADS - 1) return exactly(one);  // this lead bounds its noise from below alone
    return {one, one.score + bounds_.low[lead], one.score + bounds_.high[lead]};
  }

  // The score + noise of an id to within more than what two logarithms err by.
  Contender exactly(const Scored& one) const {
    uint64_t words[4];
    noise_.block((uint64_t)one.id / 4, row_.position, 1, words);
    const uint64_t bits = (uint64_t)row_.leads[one.id] << 36 | words[one.id % 4] >> 28;
    const double noise = -std::log(-std::log(((double)bits + 0.5) * 0x1p-52));
    const double margin = 0x1p-46 * (1 + std::fabs(noise));
    return {one, one.score + (noise - margin), one.score + (noise + margin)};
  }

  // The id of greatest score + noise among those that may be kept; false where bounds do not tell.
  bool winner(Contender& found) {
    contenders_.clear();
    least_ = bounded(best_).low;
    for (const int64_t id : strong_) offer({id, score_of(id)});
    for (int64_t place = 0; place < row_.named_count; ++place)
      offer({row_.named[place], row_.named_scores[place]});
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
    if (one.score == -INF || !may_be_kept(one)) return;
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
    runs([&](int64_t begin, int64_t end) {
      int64_t id = begin;
      for (; id + BLOCK <= end; id += BLOCK) {
        if (reaches(id, floor)) offer_above(id, id + BLOCK, floor);
      }
      offer_above(id, end, floor);
    });
  }

  void offer_above(int64_t begin, int64_t end, float floor) {
    for (int64_t id = begin; id < end; ++id)
      if (row_.logits[id] >= floor && row_.leads[id] < row_.strong) offer({id, score_of(id)});
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

  // The token under top-k: its ids are found first, and the other cuts apply to these alone.
  int64_t token_of_likeliest() {
    if (row_.top_k > MOST_TOP) return LEFT;
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

  // The first `count` ids by rank in order, or all that are not dropped.
  std::vector<Scored> likeliest(int64_t count) const {
    const float level = level_of(count);
    std::vector<Scored> found;
    runs([&](int64_t begin, int64_t end) {
      for (int64_t id = begin; id < end;) {
        const int64_t stop = std::min(end, id + BLOCK);
        if (stop - id == BLOCK && !reaches(id, level)) {
          id = stop;
          continue;
        }
        for (; id < stop; ++id)
          if (row_.logits[id] >= level && row_.logits[id] > -INF) found.push_back({id, score_of(id)});
      }
    });
    for (int64_t place = 0; place < row_.named_count; ++place)
      if (row_.named_scores[place] > -INF) found.push_back({row_.named[place], row_.named_scores[place]});
    const auto before = [](const Scored& one, const Scored& other) { return one.before(other); };
    const auto last = found.begin() + std::min<int64_t>(count, (int64_t)found.size());
    std::partial_sort(found.begin(), last, found.end(), before);
    found.erase(last, found.end());
    return found;
  }

  bool reaches(int64_t id, float level) const {
    Lanes some = {};
    for (int part = 0; part < BLOCK; part += LANES) some |= load(row_.logits + id + part) >= level;
    return any(some);
  }

  // A logit that at least `count` ids reach which processing does not change: that of the maxima of blocks.
  float level_of(int64_t count) const {
    std::vector<float> maxima;
    runs([&](int64_t begin, int64_t end) {
      for (int64_t id = begin; id + BLOCK <= end; id += BLOCK) {
        Vec most = load(row_.logits + id);
        for (int part = LANES; part < BLOCK; part += LANES) {
          const Vec x = load(row_.logits + id + part);
          most = x > most ? x : most;
        }
        float highest = most[0];
        for (int lane = 1; lane < LANES; ++lane) highest = std::max(highest, most[lane]);
        maxima.push_back(highest);
      }
    });
    if ((int64_t)maxima.size() < 2 * count) return -std::numeric_limits<float>::infinity();
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
    float logit = row_.logits[one.id];
    bool equal = true;
    if (is_named(one.id)) {
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
    const int64_t tied = equal ? one.id : 0;  // ids below this one are before it at the same logit
    Sums sums;
    if (highest_ > -INF)
      runs([&](int64_t begin, int64_t end) {
        if (begin < tied) add(begin, std::min(end, tied), logit, true, sums);
        if (end > tied) add(std::max(begin, tied), end, logit, false, sums);
      });
    const double scale = std::exp((double)highest_ / row_.temperature - best_.score);
    if (highest_ > -INF) sums.total *= scale, sums.before *= scale;
    for (int64_t place = 0; place < row_.named_count; ++place) {
      const Scored named = {row_.named[place], row_.named_scores[place]};
      const double weight = std::exp(named.score - best_.score);
      sums.total += weight;
      if (named.before(one)) sums.before += weight;
    }
    return sums;
  }

  bool is_named(int64_t id) const {
    return std::binary_search(row_.named, row_.named + row_.named_count, id);
  }

  // Adds the weights exp((logit - highest) / temperature) of ids begin to end.
  void add(int64_t begin, int64_t end, float logit, bool inclusive, Sums& sums) const {
    constexpr int64_t PART = 64 * LANES;
    const float inverse = (float)(1 / row_.temperature);
    int64_t id = begin;
    while (id + LANES <= end) {
      const int64_t stop = std::min(end - LANES, id + PART - LANES);
      Vec total = {}, before = {};
      for (; id <= stop; id += LANES) {
        const Vec x = load(row_.logits + id);
        const Vec weight = exponential((x - highest_) * inverse);
        const Lanes first = inclusive ? x >= logit : x > logit;
        total += weight;
        before += first ? weight : Vec{};
      }
      sums.total += lanes_sum(total);
      sums.before += lanes_sum(before);
    }
    for (; id < end; ++id) {
      const float x = row_.logits[id];
      const double weight = std::exp(((double)x - highest_) / row_.temperature);
      sums.total += weight;
      if (inclusive ? x >= logit : x > logit) sums.before += weight;
    }
  }

  const Row& row_;
  const Bounds& bounds_;
  Philox noise_;
  double weak_high_;
  float highest_ = 0;  // among the ids that processing does not change
  Scored best_ = {0, -INF};
  Scored rejected_ = {0, -INF};
  bool is_rejected_ = false;
  double least_ = -INF;  // a score + noise that an id reaches which may be kept
  std::vector<int64_t> strong_;
  std::vector<Contender> contenders_;
};

}  // namespace

extern "C" {

// Leading 16 bits of `count` ids.
void outrider_leads(uint64_t seed, uint64_t position, int64_t count, uint16_t* out) {
  const Philox noise = {seed};
  const int64_t blocks = count / 16;
  uint64_t words[4];
  for (int64_t block = 0; block < blocks; ++block) {
    noise.block((uint64_t)block, position, 0, words);
    std::memcpy(out + 16 * block, words, sizeof words);
  }
  if (count % 16) {
    noise.block((uint64_t)blocks, position, 0, words);
    std::memcpy(out + 16 * blocks, words, 2 * (count % 16));
  }
}

// The token of each row, LEFT where the rule has to decide. `low` and `high` are lead_bounds().
void outrider_sample(const void* rows, int64_t count, const double* low, const double* high,
                     int64_t* tokens) {
  const Bounds bounds = {low, high};
  for (int64_t place = 0; place < count; ++place) {
    Row row;
    std::memcpy(&row, static_cast<const char*>(rows) + place * sizeof(Row), sizeof(Row));
    try {
      tokens[place] = Search(row, bounds).token();
    } catch (...) {  // no memory: an exception that left C would end the process
      tokens[place] = LEFT;
    }
  }
}

}
