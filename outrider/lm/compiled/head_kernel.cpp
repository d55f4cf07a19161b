// Passes of a drafting head of one layer: it writes pairs of committed tokens, and computes levels of drafts.
//
// Called through ctypes by head_kernel.py. Keys and values of committed pairs are read and written where they
// lie, in planes of the target's pool. All numbers are float32, apart from panels of weights.

#include "head_layer.hpp"
#include "head_ranking.hpp"

namespace {

struct Plane {
  float* data;
  int64_t head_stride;  // floats between two heads; a slot has head_dim floats
};

struct Planes {
  Plane keys, values;
};

struct Committed {  // one pair to be written
  int64_t token, position, slot;
  Feature feature;
};

// One session's rows in a level. Its memory has a row for each node computed so far: keys and values, then
// the hidden state that the head expects behind the node.
struct Drafting {
  int64_t first, count;     // rows of the call
  int64_t known;            // nodes computed by earlier levels
  int64_t position;         // rotary position of the level
  Feature before;           // of the position before the last committed token
  const int64_t* runs;      // of slots of the committed pairs; the very first slot has no pair
  int64_t run_count;
  float* memory;
  const int64_t* parents;   // of all nodes so far and of the level's: a node of an earlier level, or -1
  int64_t is_ranked;
  Ranking ranking;
};

struct Level {
  int64_t sessions, rows;
  const Drafting* drafting;
  const int64_t* tokens;    // of each row
  const double* least;      // for each row, the probability below which a token is no child
  float* logits;            // [rows, vocabulary]; overwritten where rows are ranked
  int64_t* children;        // [rows, most], then `shares` of these
  double* shares;
  int64_t* counts;          // of each row
};

void write_pairs(const Head& head, const Planes& planes, int64_t count, const Committed* pairs) {
  float* hidden = scratch(HIDDEN, count * head.width);
  fuse(head, count, [&](int64_t row) { return pairs[row].feature; }, hidden);
  std::vector<int64_t> tokens(count);
  for (int64_t row = 0; row < count; ++row) tokens[row] = pairs[row].token;
  const Pairs of = pair(head, tokens.data(), hidden, count);
  const int64_t size = head.head_dim, own = head.key_value_width();
  float* found = scratch(OWN, 2 * count * own);
  head.keys_values(of.rows, count, found);
  for (int64_t row = 0; row < count; ++row) {
    float *keys = found + 2 * row * own, *values = keys + own;
    Rotation(head, pairs[row].position)(keys, head.key_heads, head.key_norm);
    for (int64_t each = 0; each < head.key_heads; ++each) {
      const int64_t at = pairs[row].slot * size;
      std::memcpy(planes.keys.data + each * planes.keys.head_stride + at, keys + each * size, size * sizeof(float));
      std::memcpy(planes.values.data + each * planes.values.head_stride + at, values + each * size,
                  size * sizeof(float));
    }
  }
}

class LevelPass {
 public:
  LevelPass(const Head& head, const Planes& planes, const Level& level)
      : head_(head), planes_(planes), level_(level), own_(head.key_value_width()),
        stride_(2 * own_ + head.width) {}

  // 0, or 2 where the largest score of a row is no number.
  int64_t run() const {
    const int64_t rows = level_.rows, width = head_.width, wide = head_.heads * head_.head_dim;
    float* hidden = scratch(HIDDEN, rows * width);
    each_session([&](const Drafting& of) { take_hidden(of, hidden + of.first * width); });
    const Pairs pairs = pair(head_, level_.tokens, hidden, rows);
    float* queries = scratch(QUERIES, rows * wide);
    head_.query(pairs.rows, rows, queries);
    float* own = scratch(OWN, 2 * rows * own_);
    head_.keys_values(pairs.rows, rows, own);
    each_session([&](const Drafting& of) { rotate(of, queries, own); });
    float* attended = scratch(ATTENDED, rows * wide);
    attend_all(queries, attended);
    float* expected = scratch(EXPECTED, rows * width);
    finish(head_, pairs.residual, attended, rows, expected);
    each_session([&](const Drafting& of) {
      for (int64_t row = 0; row < of.count; ++row)
        std::memcpy(node(of, of.known + row) + 2 * own_, expected + (of.first + row) * width, width * sizeof(float));
    });
    norm_rows(expected, rows, head_.logits_norm, width, head_.eps);
    give_logits(expected);
    return rank();
  }

 private:
  template <typename Body>
  void each_session(const Body& body) const {
    for (int64_t at = 0; at < level_.sessions; ++at) body(level_.drafting[at]);
  }

  float* node(const Drafting& of, int64_t index) const { return of.memory + index * stride_; }

  void take_hidden(const Drafting& of, float* to) const {
    const int64_t width = head_.width;
    for (int64_t row = 0; row < of.count; ++row) {
      const int64_t parent = of.parents[of.known + row];
      if (parent < 0)
        fuse(head_, 1, [&](int64_t) { return of.before; }, to + row * width);
      else
        std::memcpy(to + row * width, node(of, parent) + 2 * own_, width * sizeof(float));
    }
  }

  void rotate(const Drafting& of, float* queries, float* own) const {
    const Rotation turn(head_, of.position);
    const int64_t wide = head_.heads * head_.head_dim;
    for (int64_t row = 0; row < of.count; ++row) {
      float* query = queries + (of.first + row) * wide;
      turn(query, head_.heads, head_.query_norm);
      for (int64_t k = 0; k < wide; ++k) query[k] /= std::sqrt((float)head_.head_dim);
      float* both = own + 2 * (of.first + row) * own_;
      turn(both, head_.key_heads, head_.key_norm);
      std::memcpy(node(of, of.known + row), both, 2 * own_ * sizeof(float));
    }
  }

  static int64_t committed(const Drafting& of) {
    int64_t found = 0;
    for (int64_t run = 0; run < of.run_count; ++run) found += of.runs[2 * run + 1] - of.runs[2 * run];
    return std::max<int64_t>(0, found - 1);
  }

  void attend_all(const float* queries, float* to) const {
    const int64_t groups = head_.heads / head_.key_heads;
    struct Item { const Drafting* of; int64_t key_head, begin, end; };
    std::vector<Item> items;
    int64_t work = 0;
    each_session([&](const Drafting& of) {
      for (int64_t key_head = 0; key_head < head_.key_heads; ++key_head)
        for (int64_t begin = 0; begin < of.count * groups; begin += 4)
          items.push_back({&of, key_head, begin, std::min(of.count * groups, begin + 4)});
      work += head_.heads * of.count * committed(of);
    });
    const int64_t count = (int64_t)items.size();
    in_parallel(count, work < 256 ? count : 1, count, [&](int64_t low, int64_t high) {
      for (int64_t at = low; at < high; ++at)
        attend(*items[at].of, items[at].key_head, items[at].begin, items[at].end, queries, to);
    });
  }

  // Attention of the queries [begin, end) of a session that share a key head; a query is a row and a head.
  void attend(const Drafting& of, int64_t key_head, int64_t begin, int64_t end, const float* queries,
              float* to) const {
    const int64_t size = head_.head_dim, groups = head_.heads / head_.key_heads, count = end - begin;
    const int64_t prefix = committed(of), most = prefix + of.known + 1;
    const int64_t stride = (most + LANES - 1) / LANES * LANES;
    static thread_local std::vector<float> memory;
    if ((int64_t)memory.size() < count * (stride + size)) memory.resize(count * (stride + size));
    float *scores = memory.data(), *mixed = scores + count * stride;
    std::fill(mixed, mixed + count * size, 0.0f);
    const float* keys = planes_.keys.data + key_head * planes_.keys.head_stride;
    const float* values = planes_.values.data + key_head * planes_.values.head_stride;
    float shares[4];
    for (int64_t q = 0; q < count; ++q) {
      const float* query = queries + query_at(of, key_head, begin + q) * size;
      float* own = scores + q * stride;
      each_run(of, [&](int64_t slot, int64_t at, int64_t some) {
        score_run(1, query, keys + slot * size, some, size, own + at, 0);
      });
      int64_t seen = prefix;
      for (int64_t above = of.known + (begin + q) / groups; above >= 0; above = of.parents[above])
        score_run(1, query, node(of, above) + key_head * size, 1, size, own + seen++, 0);
      shares[q] = weigh(own, seen);
      while (seen < stride) own[seen++] = 0;
    }
    each_run(of, [&](int64_t slot, int64_t at, int64_t some) {
      mix_run(count, scores + at, stride, values + slot * size, some, size, mixed);
    });
    for (int64_t q = 0; q < count; ++q) {
      int64_t seen = prefix;
      for (int64_t above = of.known + (begin + q) / groups; above >= 0; above = of.parents[above])
        mix_run(1, scores + q * stride + seen++, stride, node(of, above) + own_ + key_head * size, 1, size,
                mixed + q * size);
      float* out = to + query_at(of, key_head, begin + q) * size;
      for (int64_t k = 0; k < size; ++k) out[k] = mixed[q * size + k] * shares[q];
    }
  }

  // Index of a query among those of all rows and heads.
  int64_t query_at(const Drafting& of, int64_t key_head, int64_t query) const {
    const int64_t groups = head_.heads / head_.key_heads;
    return (of.first + query / groups) * head_.heads + key_head * groups + query % groups;
  }

  // Turns scores into weights; returns one over their sum.
  static float weigh(float* scores, int64_t count) {
    float top = scores[0];
    for (int64_t at = 1; at < count; ++at) top = std::max(top, scores[at]);
    float sum = 0;
    int64_t at = 0;
    Vec sums{};
    for (; at + LANES <= count; at += LANES) {
      const Vec weights = exp_of(load(scores + at) - top);
      store(scores + at, weights);
      sums += weights;
    }
    for (int lane = 0; lane < LANES; ++lane) sum += sums[lane];
    for (; at < count; ++at) sum += scores[at] = std::exp(scores[at] - top);
    return 1.0f / sum;
  }

  // Calls body(slot, pair, count) for each run of slots that have pairs.
  template <typename Body>
  static void each_run(const Drafting& of, const Body& body) {
    int64_t at = 0;
    for (int64_t run = 0; run < of.run_count; ++run) {
      const int64_t low = of.runs[2 * run] + (run == 0), high = of.runs[2 * run + 1];
      if (low < high) body(low, at, high - low);
      at += high - low;
    }
  }

  void give_logits(const float* expected) const {
    if (head_.drafted_ids == nullptr) return head_.lm_head(expected, level_.rows, level_.logits);
    float* drafted = scratch(DRAFTED, level_.rows * head_.drafted);
    head_.lm_head(expected, level_.rows, drafted);
    std::fill(level_.logits, level_.logits + level_.rows * head_.vocabulary,
              -std::numeric_limits<float>::infinity());
    for (int64_t row = 0; row < level_.rows; ++row)
      for (int64_t at = 0; at < head_.drafted; ++at)
        level_.logits[row * head_.vocabulary + head_.drafted_ids[at]] = drafted[row * head_.drafted + at];
  }

  int64_t rank() const {
    const int64_t width = head_.vocabulary;
    bool fine = true;
    each_session([&](const Drafting& of) {
      if (!of.is_ranked) return;
      float* noise = of.ranking.leads == nullptr ? nullptr : scratch(NOISE, width + LANES);
      if (noise != nullptr) noise_of(of.ranking, width, noise);
      for (int64_t row = of.first; row < of.first + of.count; ++row) {
        const int64_t at = row * of.ranking.most;
        level_.counts[row] = rank_row(level_.logits + row * width, noise, width, of.ranking, level_.least[row],
                                      level_.children + at, level_.shares + at);
        fine &= level_.counts[row] >= 0;
      }
    });
    return fine ? 0 : 2;
  }

  const Head& head_;
  const Planes& planes_;
  const Level& level_;
  const int64_t own_, stride_;
};

}  // namespace

extern "C" {

// Number of outputs of a panel of weights on the processor that this was compiled for.
int64_t outrider_panel_width() { return PANEL; }

// Writes pairs of committed tokens into the planes; returns 0, or 1 after an error.
int64_t outrider_head_write(const Head* head, const Planes* planes, int64_t count, const Committed* pairs) {
  try {
    write_pairs(*head, *planes, count, pairs);
    return 0;
  } catch (...) {
    return 1;
  }
}

// Computes one level; returns 0, 1 after an error, or 2 where the largest score of a row is no number.
int64_t outrider_head_level(const Head* head, const Planes* planes, const Level* level) {
  try {
    return LevelPass(*head, *planes, *level).run();
  } catch (...) {
    return 1;
  }
}
}
