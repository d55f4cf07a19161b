// The compiled index of one tenant's past outputs: the positions of a growing text, sorted by the ids that end
// at each, read backwards. It finds what `python_index.py` finds, block for block, and differs in speed alone.
//
// Plain C++ behind a C interface. Callers hold the tenant's lock. No handle, count or position makes a call
// read or write outside the index, whatever was called before; a call that runs out of memory says so.

#include <algorithm>
#include <cstdint>
#include <new>
#include <vector>

namespace {

constexpr uint32_t CONTEXT = 32;                  // ids compared
constexpr uint32_t PAGE = 256;                    // positions of a page, which belong to one sequence
constexpr uint32_t FIRST_PAGE = (1u << 31) / PAGE;  // positions sort after every id
constexpr uint32_t MOST_PAGES = FIRST_PAGE - 1;
constexpr uint32_t BLOCK = 256;                   // positions at which a block is split in two
constexpr uint32_t ABOVE = 0xFFFFFFFF;            // greater than every id and position
constexpr uint32_t HEAD = 6;                      // parts of a block's first key that lie beside the others'
constexpr uint32_t ID_END = 1u << 31;
constexpr int64_t MOST_IDS = 1 << 30;             // of one sequence

enum Status : int64_t { OK = 0, REFUSED = -1, NO_MEMORY = -2, DAMAGED = -3 };

// The ids that end at a position, latest first, then the position itself; or what is searched for.
struct Key {
  uint32_t parts[CONTEXT + 2];
  uint32_t size = 0;
};

struct Page {
  const uint32_t* ids = nullptr;  // of the sequence from this page on
  uint32_t start = 0;             // index of the page's first id in its sequence
  uint32_t owner = 0;             // handle of the sequence
  bool is_free = false;
};

struct Sequence {
  std::vector<uint32_t> ids;
  std::vector<uint32_t> pages;
  uint32_t indexed = 0;  // positions 0 .. indexed-1 are in the order
  bool is_open = false;
};

using Block = std::vector<uint32_t>;

struct First {
  uint32_t head[HEAD];
  uint32_t position;
};

struct Place {
  size_t block, index;
};

class PastIndex {
 public:
  int64_t open() {
    is_loading_ = false;
    loaded_ = std::vector<bool>();
    return new_handle();
  }

  int64_t extend(int64_t handle, const uint32_t* ids, int64_t count) {
    Sequence* sequence = find(handle);
    if (!sequence || count < 0 || count > MOST_IDS - int64_t(sequence->ids.size())) return REFUSED;
    if (std::any_of(ids, ids + count, [](uint32_t id) { return id >= ID_END; })) return REFUSED;
    grow(*sequence, sequence->ids.size() + size_t(count));
    sequence->ids.insert(sequence->ids.end(), ids, ids + count);
    while (size_t(sequence->indexed) + 1 < sequence->ids.size()) {
      if (sequence->indexed % PAGE == 0 && sequence->pages.size() * PAGE <= sequence->indexed)
        if (!add_page(*sequence)) return REFUSED;
      add(position(*sequence, sequence->indexed));
      ++sequence->indexed;
    }
    return OK;
  }

  int64_t finish(int64_t handle) {
    Sequence* sequence = find(handle);
    if (!sequence) return REFUSED;
    sequence->ids.shrink_to_fit();
    sequence->pages.shrink_to_fit();
    point(*sequence);
    return OK;
  }

  // Takes positions out of the order, latest first; with the last one the sequence goes. The steps taken.
  int64_t remove(int64_t handle, int64_t steps) {
    Sequence* sequence = find(handle);
    if (!sequence) return REFUSED;
    int64_t taken = 0;
    for (; taken < steps && sequence->indexed; ++taken) {
      if (!take_out(position(*sequence, sequence->indexed - 1))) return DAMAGED;
      --sequence->indexed;
    }
    return taken;
  }

  int64_t close(int64_t handle) {
    Sequence* sequence = find(handle);
    if (!sequence || sequence->indexed) return REFUSED;
    free_pages_.reserve(pages_.size());
    for (uint32_t page : sequence->pages) {
      pages_[page - FIRST_PAGE] = Page{nullptr, 0, 0, true};
      free_pages_.push_back(page);
    }
    *sequence = Sequence();
    free_.push_back(uint32_t(handle));
    return OK;
  }

  // The longest prefix of `ids` (latest first) that occurs. For at most `most` occurrences, evenly spread,
  // `found` gets the sequence's handle and the index of the id that follows.
  int64_t read(const uint32_t* ids, int64_t count, int64_t most, int64_t* found, int64_t* number) const {
    *number = 0;
    if (count < 1 || most < 1) return 0;
    Key key;
    key.size = uint32_t(std::min<int64_t>(count, CONTEXT));
    std::copy(ids, ids + key.size, key.parts);
    const Place start = place(key);
    const uint32_t length = longest(key, start);
    if (!length) return 0;
    key.size = length;
    const Place first = place(key);
    key.parts[key.size++] = ABOVE;
    *number = sample(first, place(key), most, found);
    return length;
  }

  // Takes over a sequence of another index, with its pages.
  int64_t load_sequence(const uint32_t* ids, int64_t count, const uint32_t* pages, int64_t number,
                        int64_t indexed) {
    if (count < 0 || count > MOST_IDS || number < 0 || number > MOST_PAGES) return REFUSED;
    if (indexed < 0 || indexed > std::min(count, number * int64_t(PAGE))) return REFUSED;
    if (!is_loading_ || !blocks_.empty()) return REFUSED;
    if (std::any_of(ids, ids + count, [](uint32_t id) { return id >= ID_END; })) return REFUSED;
    for (int64_t at = 0; at < number; ++at) {
      if (at * PAGE >= count || !make_page(pages[at]) || !is_unused(pages[at])) return REFUSED;
      if (std::find(pages, pages + at, pages[at]) != pages + at) return REFUSED;
    }
    const int64_t handle = new_handle();
    if (handle < 0) return handle;
    Sequence& sequence = sequences_[handle];
    sequence.ids.assign(ids, ids + count);
    sequence.pages.assign(pages, pages + number);
    sequence.indexed = uint32_t(indexed);
    for (int64_t at = 0; at < number; ++at) {
      const uint32_t start = uint32_t(at) * PAGE;
      pages_[pages[at] - FIRST_PAGE] = Page{sequence.ids.data() + start, start, uint32_t(handle), false};
    }
    return handle;
  }

  int64_t load_free_page(uint32_t page) {
    if (!is_loading_ || !make_page(page) || !is_unused(page)) return REFUSED;
    free_pages_.push_back(page);
    pages_[page - FIRST_PAGE].is_free = true;
    return OK;
  }

  // Takes over a block of another index's order; blocks come in their order.
  int64_t load_block(const uint32_t* positions, int64_t count) {
    if (!is_loading_ || count < 1 || count > BLOCK) return REFUSED;
    loaded_.resize(pages_.size() * PAGE);
    for (int64_t at = 0; at < count; ++at) {
      if (!is_indexed(positions[at]) || loaded_[positions[at] - FIRST_PAGE * PAGE]) return REFUSED;
      loaded_[positions[at] - FIRST_PAGE * PAGE] = true;
    }
    firsts_.reserve(firsts_.size() == firsts_.capacity() ? 2 * firsts_.size() + 1 : 0);
    blocks_.emplace_back(positions, positions + count);
    firsts_.push_back(first_of(positions[0]));
    return OK;
  }

 private:
  Sequence* find(int64_t handle) {
    is_loading_ = false;
    if (handle < 0 || size_t(handle) >= sequences_.size() || !sequences_[handle].is_open) return nullptr;
    return &sequences_[handle];
  }

  int64_t new_handle() {
    if (free_.empty()) {
      if (sequences_.size() >= MOST_PAGES) return REFUSED;
      sequences_.emplace_back();
      free_.reserve(sequences_.capacity());
      free_.push_back(uint32_t(sequences_.size() - 1));
    }
    const uint32_t handle = free_.back();
    free_.pop_back();
    sequences_[handle].is_open = true;
    return handle;
  }

  static uint32_t position(const Sequence& sequence, uint32_t index) {
    return sequence.pages[index / PAGE] * PAGE + index % PAGE;
  }

  bool make_page(uint32_t page) {
    if (page < FIRST_PAGE || page - FIRST_PAGE >= MOST_PAGES) return false;
    if (page - FIRST_PAGE >= pages_.size()) pages_.resize(page - FIRST_PAGE + 1);
    return true;
  }

  bool is_unused(uint32_t page) const {
    return !pages_[page - FIRST_PAGE].ids && !pages_[page - FIRST_PAGE].is_free;
  }

  bool is_indexed(uint32_t position) const {
    const uint32_t page = position / PAGE;
    if (page < FIRST_PAGE || page - FIRST_PAGE >= pages_.size() || !pages_[page - FIRST_PAGE].ids) return false;
    const Page& found = pages_[page - FIRST_PAGE];
    return found.start + position % PAGE < sequences_[found.owner].indexed;
  }

  // The id at a position and, in `index`, its index in its sequence.
  const uint32_t* at(uint32_t position, uint32_t* index) const {
    const Page& page = pages_[position / PAGE - FIRST_PAGE];
    *index = page.start + position % PAGE;
    return page.ids + position % PAGE;
  }

  void grow(Sequence& sequence, size_t size) {
    if (size <= sequence.ids.capacity()) return;
    sequence.ids.reserve(std::max(size, sequence.ids.size() + sequence.ids.size() / 8 + 8));
    point(sequence);
  }

  void point(Sequence& sequence) {
    for (size_t number = 0; number < sequence.pages.size(); ++number)
      pages_[sequence.pages[number] - FIRST_PAGE].ids = sequence.ids.data() + number * PAGE;
  }

  bool add_page(Sequence& sequence) {
    sequence.pages.reserve(sequence.pages.size() + 1);
    if (free_pages_.empty()) {
      if (pages_.size() >= MOST_PAGES) return false;
      pages_.emplace_back();
      free_pages_.push_back(uint32_t(FIRST_PAGE + pages_.size() - 1));
    }
    const uint32_t page = free_pages_.back();
    free_pages_.pop_back();
    const uint32_t start = uint32_t(sequence.pages.size()) * PAGE;
    const uint32_t owner = uint32_t(&sequence - sequences_.data());
    pages_[page - FIRST_PAGE] = Page{sequence.ids.data() + start, start, owner, false};
    sequence.pages.push_back(page);
    return true;
  }

  void fill(Key& key, uint32_t position) const {
    uint32_t index;
    const uint32_t* last = at(position, &index);
    const uint32_t size = std::min(index + 1, CONTEXT);
    for (uint32_t part = 0; part < size; ++part) key.parts[part] = *(last - part);
    key.parts[size] = position;
    key.size = size + 1;
  }

  // Whether the key of a position is below `key`, whose first `same` parts it shares.
  bool below(uint32_t position, const Key& key, uint32_t same = 0) const {
    uint32_t index;
    const uint32_t* last = at(position, &index);
    const uint32_t size = std::min(index + 1, CONTEXT);
    for (uint32_t part = same; part < key.size; ++part) {
      if (part > size) return true;
      const uint32_t ours = part < size ? *(last - part) : position;
      if (ours != key.parts[part]) return ours < key.parts[part];
    }
    return false;
  }

  bool below(const First& first, const Key& key) const {
    const uint32_t size = std::min(HEAD, key.size);
    for (uint32_t part = 0; part < size; ++part)
      if (first.head[part] != key.parts[part]) return first.head[part] < key.parts[part];
    return key.size > HEAD && below(first.position, key, HEAD);
  }

  First first_of(const Key& key, uint32_t position) const {
    First first{{}, position};
    std::copy(key.parts, key.parts + std::min(HEAD, key.size), first.head);
    return first;
  }

  First first_of(uint32_t position) const {
    Key key;
    fill(key, position);
    return first_of(key, position);
  }

  // The number of blocks whose first key is below `key`.
  size_t blocks_below(const Key& key) const {
    return std::partition_point(firsts_.begin(), firsts_.end(),
                                [&](const First& first) { return below(first, key); }) -
           firsts_.begin();
  }

  size_t in_block(const Block& block, const Key& key) const {
    return std::partition_point(block.begin(), block.end(),
                                [&](uint32_t position) { return below(position, key); }) -
           block.begin();
  }

  Place place(const Key& key) const {
    const size_t before = blocks_below(key);
    if (!before) return {0, 0};
    return {before - 1, in_block(blocks_[before - 1], key)};
  }

  void add(uint32_t position) {
    Key key;
    fill(key, position);
    size_t number = blocks_below(key);
    if (!number) {
      if (blocks_.empty()) {
        firsts_.reserve(1);
        blocks_.emplace_back(1, position);
        firsts_.push_back(first_of(key, position));
        return;
      }
      make_room(blocks_[0]);
      firsts_[0] = first_of(key, position);
      blocks_[0].insert(blocks_[0].begin(), position);
    } else {
      Block& block = blocks_[--number];
      make_room(block);
      block.insert(block.begin() + in_block(block, key), position);
    }
    if (blocks_[number].size() > BLOCK) split(number);
  }

  static void make_room(Block& block) {
    const size_t size = block.size();
    if (size == block.capacity()) block.reserve(std::min<size_t>(BLOCK + 1, size + size / 4 + 8));
  }

  void split(size_t number) {
    const Block& block = blocks_[number];
    Block low(block.begin(), block.begin() + BLOCK / 2), high(block.begin() + BLOCK / 2, block.end());
    firsts_.reserve(firsts_.size() == firsts_.capacity() ? 2 * firsts_.size() : 0);
    blocks_.reserve(blocks_.size() == blocks_.capacity() ? 2 * blocks_.size() : 0);
    firsts_.insert(firsts_.begin() + number + 1, first_of(high[0]));
    blocks_[number] = std::move(low);
    blocks_.insert(blocks_.begin() + number + 1, std::move(high));
  }

  bool take_out(uint32_t position) {
    Key key;
    fill(key, position);
    // Its own block's first key may be the key itself.
    size_t number = blocks_below(key);
    if (number < firsts_.size() && firsts_[number].position == position) ++number;
    if (!number) return false;
    Block& block = blocks_[--number];
    const size_t index = in_block(block, key);
    if (index == block.size() || block[index] != position) return false;
    block.erase(block.begin() + index);
    if (block.empty()) {
      blocks_.erase(blocks_.begin() + number);
      firsts_.erase(firsts_.begin() + number);
      return true;
    }
    if (!index) firsts_[number] = first_of(block[0]);
    if (block.size() < BLOCK / 4) join(number);
    return true;
  }

  void join(size_t number) {
    for (size_t left = number ? number - 1 : 0; left <= number; ++left) {
      if (left + 1 >= blocks_.size()) return;
      Block &low = blocks_[left], &high = blocks_[left + 1];
      if (low.size() + high.size() > BLOCK / 2) continue;
      low.insert(low.end(), high.begin(), high.end());
      blocks_.erase(blocks_.begin() + left + 1);
      firsts_.erase(firsts_.begin() + left + 1);
      return;
    }
  }

  uint32_t shared(uint32_t position, const Key& key) const {
    uint32_t index, length = 0;
    const uint32_t* last = at(position, &index);
    const uint32_t size = std::min({index + 1, CONTEXT, key.size});
    while (length < size && *(last - length) == key.parts[length]) ++length;
    return length;
  }

  // Parts of `key` that the neighbours of its place share.
  uint32_t longest(const Key& key, const Place& place) const {
    if (place.block >= blocks_.size()) return 0;
    const Block& block = blocks_[place.block];
    uint32_t length = 0;
    if (place.index) length = shared(block[place.index - 1], key);
    if (place.index < block.size())
      length = std::max(length, shared(block[place.index], key));
    else if (place.block + 1 < blocks_.size())
      length = std::max(length, shared(blocks_[place.block + 1][0], key));
    return length;
  }

  // At most `most` occurrences of a range, evenly spread; see `ContextOrder.sample`.
  int64_t sample(Place first, Place last, int64_t most, int64_t* found) const {
    if (last.block < first.block) return 0;
    int64_t number = 0;
    auto take = [&](uint32_t position) {
      const Page& page = pages_[position / PAGE - FIRST_PAGE];
      found[2 * number] = page.owner;
      found[2 * number + 1] = int64_t(page.start) + position % PAGE + 1;
      ++number;
    };
    if (last.block - first.block > size_t(most)) {
      // Too many blocks to look at: the middle of one in every few.
      const double step = double(last.block - first.block - 1) / double(most);
      for (int64_t at = 0; at < most; ++at) {
        const Block& block = blocks_[first.block + 1 + size_t(step * double(at))];
        take(block[block.size() / 2]);
      }
      return number;
    }
    std::vector<uint32_t> all;
    for (size_t block = first.block; block <= last.block && block < blocks_.size(); ++block) {
      const size_t start = block == first.block ? first.index : 0;
      const size_t end = block == last.block ? last.index : blocks_[block].size();
      if (start < end) all.insert(all.end(), blocks_[block].begin() + start, blocks_[block].begin() + end);
    }
    const size_t size = all.size(), taken = std::min(size, size_t(most));
    for (size_t at = 0; at < taken; ++at) take(all[size <= taken ? at : at * size / taken]);
    return number;
  }

  std::vector<Sequence> sequences_;
  std::vector<uint32_t> free_;
  std::vector<Page> pages_;
  std::vector<uint32_t> free_pages_;
  std::vector<Block> blocks_;
  std::vector<First> firsts_;
  bool is_loading_ = true;    // until the first call that changes a sequence
  std::vector<bool> loaded_;  // while blocks are taken over: whether one had a position, by position
};

template <class Call>
int64_t guarded(Call call) noexcept {
  try {
    return call();
  } catch (...) {
    return NO_MEMORY;
  }
}

}  // namespace

extern "C" {

void* past_new() { return new (std::nothrow) PastIndex; }
void past_delete(void* index) { delete static_cast<PastIndex*>(index); }

int64_t past_open(void* index) {
  return guarded([&] { return static_cast<PastIndex*>(index)->open(); });
}
int64_t past_extend(void* index, int64_t handle, const uint32_t* ids, int64_t count) {
  return guarded([&] { return static_cast<PastIndex*>(index)->extend(handle, ids, count); });
}
int64_t past_finish(void* index, int64_t handle) {
  return guarded([&] { return static_cast<PastIndex*>(index)->finish(handle); });
}
int64_t past_remove(void* index, int64_t handle, int64_t steps) {
  return guarded([&] { return static_cast<PastIndex*>(index)->remove(handle, steps); });
}
int64_t past_close(void* index, int64_t handle) {
  return guarded([&] { return static_cast<PastIndex*>(index)->close(handle); });
}
int64_t past_read(const void* index, const uint32_t* ids, int64_t count, int64_t most, int64_t* found,
                  int64_t* number) {
  return guarded([&] { return static_cast<const PastIndex*>(index)->read(ids, count, most, found, number); });
}
int64_t past_load_sequence(void* index, const uint32_t* ids, int64_t count, const uint32_t* pages,
                           int64_t number, int64_t indexed) {
  return guarded([&] {
    return static_cast<PastIndex*>(index)->load_sequence(ids, count, pages, number, indexed);
  });
}
int64_t past_load_free_page(void* index, uint32_t page) {
  return guarded([&] { return static_cast<PastIndex*>(index)->load_free_page(page); });
}
int64_t past_load_block(void* index, const uint32_t* positions, int64_t count) {
  return guarded([&] { return static_cast<PastIndex*>(index)->load_block(positions, count); });
}
}
