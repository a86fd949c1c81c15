// Several runs over each other.
"use strict";
poll(async () => {
  const answer = await ask("/api/compare" + location.search);
  Charts.show(byId("curves"), answer.curves, "compare");
  return answer.is_complete ? 5000 : 50;
});
