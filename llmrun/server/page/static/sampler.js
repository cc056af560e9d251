// What the sampler leaves of candidates at other settings. For the chat page, a module, and for the page of an explained
// answer, which has it as a plain script.
"use strict";

// The sampler's steps on candidates, the likeliest first: {index, share, count} are `count` candidates with this share
// each. Of all other candidates only the number and the sum are known: they count as equal, and have no index.
const STEPS = {
  top_k(kept, k) {
    let room = k || Infinity;
    return kept.map(each => {
      const count = Math.min(each.count, room);
      room -= count;
      return { ...each, count };
    });
  },
  top_p(kept, p) {
    let before = 0;
    return kept.map(each => {
      const count = p < 1 ? Math.min(each.count, Math.ceil((p - before) / each.share)) : each.count;
      before += each.share * each.count;
      return { ...each, count };
    });
  },
  min_p: (kept, p) => kept.filter(({ share }) => share >= p * kept[0].share),
  temperature: (kept, t) =>
    t > 0 ? kept.map(each => ({ ...each, share: (each.share / kept[0].share) ** (1 / t) }))
      : [{ ...kept[0], count: 1 }],
};

/** Apply the sampler's steps to probabilities, the likeliest first, and to `others`: [number, probability of each]. */
function recompute(probabilities, others, order, values) {
  const normed = all => {
    const kept = all.filter(({ count }) => count > 0);
    const sum = kept.reduce((total, { share, count }) => total + share * count, 0) || 1;
    return kept.map(each => ({ ...each, share: each.share / sum }));
  };
  const rest = others[1] ? [{ share: others[1], count: others[0] }] : [];
  let kept = normed([...probabilities.map((share, index) => ({ index, share, count: 1 })), ...rest]);
  for (const step of order) {
    const left = normed(STEPS[step](kept, values[step]));
    kept = left.length ? left : [{ ...kept[0], count: 1, share: 1 }];
  }
  const shares = probabilities.map(() => 0);
  for (const { index, share } of kept) if (index !== undefined) shares[index] = share;
  return { shares, left: kept.reduce((total, { count }) => total + count, 0) };
}

globalThis.recompute = recompute;
