// Random calls of the compiled index with random arguments. Run with sanitizers: it ends with 0 unless a call
// touches what it must not.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

extern "C" {
void* past_new();
void past_delete(void*);
int64_t past_open(void*);
int64_t past_extend(void*, int64_t, const uint32_t*, int64_t);
int64_t past_finish(void*, int64_t);
int64_t past_remove(void*, int64_t, int64_t);
int64_t past_close(void*, int64_t);
int64_t past_read(const void*, const uint32_t*, int64_t, int64_t, int64_t*, int64_t*);
int64_t past_load_sequence(void*, const uint32_t*, int64_t, const uint32_t*, int64_t, int64_t);
int64_t past_load_free_page(void*, uint32_t);
int64_t past_load_block(void*, const uint32_t*, int64_t);
}

int main(int, char** arguments) {
  const int lives = std::atoi(arguments[1]);
  for (int life = 0; life < lives; ++life) {
    std::mt19937 random(life);
    auto below = [&](uint32_t end) { return int64_t(random() % end); };
    auto numbers = [&](int64_t count, uint32_t odd) {
      std::vector<uint32_t> made(count);
      for (uint32_t& one : made) one = below(100) < odd ? random() : uint32_t(below(3));
      return made;
    };
    auto page = [&] { return below(10) ? (1u << 23) + uint32_t(below(6)) : uint32_t(random()); };
    auto handle = [&] { return below(20) ? below(6) : int64_t(random()) - (int64_t(1) << 31); };
    void* index = past_new();
    if (below(2)) {  // one whole sequence, whose only position may come twice
      const uint32_t two[2] = {1, 2}, first = 1u << 23, position = first * 256;
      past_load_sequence(index, two, 2, &first, 1, 1);
      for (int call = below(4); call > 0; --call) past_load_block(index, &position, 1);
    }
    for (int call = below(12); call > 0; --call) {
      std::vector<uint32_t> ids = numbers(below(700), 0), pages(ids.size() / 256 + below(2));
      for (uint32_t& one : pages) one = page();
      past_load_sequence(index, ids.data(), ids.size(), pages.data(), pages.size(), below(ids.size() + 2));
      if (below(3) == 0) past_load_free_page(index, page());
    }
    for (int call = below(40); call > 0; --call) {
      // Few different positions, so that some come twice.
      std::vector<uint32_t> block(1 + below(4));
      for (uint32_t& one : block) one = page() * 256 + uint32_t(below(below(4) ? 4 : 256));
      past_load_block(index, block.data(), below(20) ? int64_t(block.size()) : -below(3));
    }
    for (int call = 0; call < 2000; ++call) {
      std::vector<uint32_t> ids = numbers(1 + below(below(20) ? 8 : 900), below(30) ? 0 : 5);
      std::vector<int64_t> found(128);
      int64_t number = 0;
      switch (below(9)) {
        case 0: past_open(index); break;
        case 1: past_finish(index, handle()); break;
        case 2: past_remove(index, handle(), int64_t(below(400)) - 5); break;
        case 3: past_close(index, handle()); break;
        case 4: past_read(index, ids.data(), ids.size(), below(65), found.data(), &number); break;
        case 5: past_load_block(index, ids.data(), ids.size()); break;
        default: past_extend(index, handle(), ids.data(), below(50) ? int64_t(ids.size()) : -below(9)); break;
      }
      if (number < 0 || number > 64) return 1;
    }
    past_delete(index);
  }
  std::printf("%d lives\n", lives);
}
