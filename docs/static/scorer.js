// A whole heading is a better answer than a word of one, and the page of a technique is better than
// one that mentions it, or lists names.
const LATER = [
  [/^(benchmarks|CHANGELOG|docs.records)/, 12],
  [/^docs.(api|names|coming_from.every_item)/, 8],
  [/^(docs.coming_from|notebooks|[A-Z])/, 4],
  [/^docs.[^/]*$/, 1],
];
var Scorer = {
  score: ([page, , , , score, , kind]) =>
    score + (kind === "title" ? 5 : 0)
      - (LATER.find(([pattern]) => pattern.test(page)) ?? [0, 0])[1],
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
