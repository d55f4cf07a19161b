// Noise, prefix hashes and vocabulary digests of docs/edge.md in JavaScript, compared with the test vectors:
// node tests/edge/vectors.mjs docs/edge
import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";

const WORD = (1n << 64n) - 1n;
const TOKENS_KEY = 0x746F6B656E730002n;

function mix(value) {
  let z = (value + 0x9E3779B97F4A7C15n) & WORD;
  z = ((z ^ (z >> 30n)) * 0xBF58476D1CE4E5B9n) & WORD;
  z = ((z ^ (z >> 27n)) * 0x94D049BB133111EBn) & WORD;
  return z ^ (z >> 31n);
}

function prefixHash(ids) {
  return ids.reduce((hash, id) => (hash * 0xD1342543DE82EF95n + mix(BigInt(id))) & WORD, 0x6F75747269646572n);
}

function philox(key, counter) {
  let [a, b, c, d] = counter;
  let [low, high] = key;
  for (let round = 0; round < 10; round++) {
    const left = 0xD2E7470EE14C6C93n * a, right = 0xCA5A826395121157n * c;
    [a, b, c, d] = [(right >> 64n) ^ b ^ low, right & WORD, (left >> 64n) ^ d ^ high, left & WORD];
    low = (low + 0x9E3779B97F4A7C15n) & WORD;
    high = (high + 0xBB67AE8584CAA73Bn) & WORD;
  }
  return [a, b, c, d];
}

function lead(seed, position, id) {
  const word = philox([seed, TOKENS_KEY], [BigInt(id >> 4), BigInt(position), 0n, 0n])[(id & 15) >> 2];
  return Number((word >> BigInt(16 * (id & 3))) & 0xFFFFn);
}

function uniform(seed, position, id) {
  const tail = Number(philox([seed, TOKENS_KEY], [BigInt(id >> 2), BigInt(position), 1n, 0n])[id & 3] >> 28n);
  return (lead(seed, position, id) * 2 ** 36 + tail + 0.5) * 2 ** -52;
}

const digest = tokens =>
  createHash("sha256").update(tokens.map((token, id) => `${id}\t${token}\n`).join("")).digest("hex");
const read = name => JSON.parse(readFileSync(`${process.argv[2]}/${name}.json`, "utf8"));

let wrong = 0, checked = 0;
function check(what, equal) {
  checked++;
  if (!equal) {
    wrong++;
    console.error(`${what} differs`);
  }
}

for (const entry of read("noise").noise) {
  const [seed, place] = [BigInt(entry.seed), `seed ${entry.seed}, position ${entry.position}, id ${entry.id}`];
  const u = uniform(seed, entry.position, entry.id);
  check(`lead at ${place}`, lead(seed, entry.position, entry.id) === entry.lead);
  check(`uniform at ${place}`, u === entry.uniform);
  check(`noise at ${place}`, Math.abs(-Math.log(-Math.log(u)) - entry.noise) <= 1e-14 * Math.abs(entry.noise));
}
for (const entry of read("prefix-hashes").prefix_hashes)
  check(`hash of ${entry.ids.length} ids`, prefixHash(entry.ids) === BigInt(entry.hash));
for (const entry of read("vocabularies").vocabularies) check("a digest", digest(entry.tokens) === entry.digest);
const began = performance.now();
for (let position = 0; position < 100; position++) for (let id = 0; id < 64; id++) uniform(42n, position, 997 * id);
console.log(`${checked - wrong} of ${checked} equal; 64 ids take ${((performance.now() - began) / 100).toFixed(1)} ms`);
process.exit(wrong || !checked ? 1 : 0);
