"""Words that prompts are made of."""


def _split(text: str) -> list[str]:
    """Entries of a text, separated by semicolons."""
    return [" ".join(entry.split()) for entry in text.split(";")]


TOPICS = _split("""
    gravity; volcanoes; the water cycle; plate tectonics; magnets; lightning; tides; eclipses; black holes; comets;
    the human heart; the immune system; digestion; sleep; muscles; the brain; the lungs; vision; hearing; DNA;
    bacteria; viruses; fungi; pollination; food chains; coral reefs; rainforests; deserts; glaciers; migration of birds;
    evolution; fossils; dinosaurs; photosensitive cells; fermentation; soil; composting; solar panels; wind turbines;
    nuclear power; batteries; electric cars; bridges; elevators; bicycles; airplanes; submarines; rockets; satellites;
    telescopes; microscopes; lasers; radio waves; the internet; search engines; encryption; passwords; databases;
    operating systems; machine learning; robots; video games; printers; cameras; clocks; the printing press; paper;
    the steam engine; the Roman Empire; ancient Egypt; the Middle Ages; the Renaissance; the Industrial Revolution;
    the French Revolution; Vikings; samurai; explorers of the sea; the Cold War; the Olympic Games; democracy; taxes;
    inflation; banks; insurance; the stock market; supply and demand; trade; advertising; trade unions; courts of law;
    elections; human rights; constitutions; the United Nations; census data; city planning; public transport;
    recycling; air pollution; climate change; floods; earthquakes; hurricanes; droughts; agriculture; fishing; mining;
    cooking; bread; cheese; coffee; tea; chocolate; salt; sugar; spices; nutrition; vitamins; exercise; yoga; stress;
    memory; habits; dreams; emotions; language learning; grammar; poetry; novels; theatre; film; photography; painting;
    sculpture; architecture; jazz; classical music; opera; folk songs; the piano; the guitar; dance; fashion; chess;
    football; tennis; swimming; mountaineering; gardening; knitting; carpentry; pottery; maps; calendars; money;
    libraries; museums; schools; universities; hospitals; zoos; national parks; islands; rivers; lakes; mountains
""")
OBJECTS = _split("""
    a lamp; a kettle; a violin; a wooden chair; an umbrella; a ladder; a pocket watch; a backpack; a tent; a mirror;
    a pair of boots; a red scarf; an old letter; a broken radio; a silver coin; a paper boat; a telescope; a typewriter;
    a toolbox; a teapot; a sewing machine; a chessboard; a lantern; a suitcase; a garden hose; a bicycle pump; a candle;
    a glass jar; a wool blanket; a rusty key; a notebook; a fountain pen; a camera; a compass; a kite; a drum; a basket;
    a fishing rod; a map; a clay pot; a music box; a ring; a whistle; a bell; a puzzle; a hammer; a snow globe; a quilt
""")
PLACES = _split("""
    Japan; Brazil; Kenya; Norway; Egypt; Canada; Mexico; India; Italy; Greece; Iceland; Peru; Vietnam; Morocco; Poland;
    Australia; New Zealand; South Africa; Turkey; Portugal; Ireland; Thailand; Chile; Finland; Nigeria; Indonesia;
    Spain; Austria; Cuba; Nepal; Jordan; Ghana; Argentina; Sweden; Hungary; Paris; London; Rome; Tokyo; Cairo; Lisbon;
    Vienna; Prague; Dublin; Oslo; Istanbul; Mumbai; Sydney; Toronto; Chicago; Boston; Seattle; Madrid; Berlin; Athens;
    Bangkok; Lima; Havana; Nairobi; Helsinki; Warsaw; Budapest; Edinburgh; Venice; Kyoto; Marrakesh; Reykjavik
""")
JOBS = _split("""
    teacher; nurse; carpenter; farmer; baker; pilot; librarian; engineer; journalist; chef; firefighter; lawyer;
    photographer; gardener; dentist; plumber; electrician; translator; architect; sailor; tailor; musician; detective;
    mechanic; painter; scientist; shopkeeper; bus driver; veterinarian; accountant; actor; blacksmith; beekeeper;
    lighthouse keeper; astronaut; museum guide; postman; waiter; programmer; biologist; historian; judge; coach
""")
ANIMALS = _split("""
    dog; cat; horse; elephant; penguin; owl; dolphin; octopus; bear; wolf; fox; rabbit; turtle; parrot; whale; bee; ant;
    frog; snake; lion; tiger; giraffe; camel; kangaroo; koala; squirrel; hedgehog; bat; eagle; swan; goat; sheep;
    otter; beaver; shark; crab; butterfly; mouse; donkey; flamingo; seal; panda; moose; salmon; snail; crow; duck
""")
FOODS = _split("""
    tomato soup; pancakes; an omelette; fried rice; a vegetable curry; apple pie; lentil stew; a green salad; pizza;
    spaghetti; banana bread; oatmeal cookies; mashed potatoes; roast chicken; fish tacos; hummus; a fruit salad;
    mushroom risotto; garlic bread; pumpkin soup; scrambled eggs; a cheese sandwich; chocolate cake; rice pudding;
    vegetable lasagne; dumplings; coleslaw; a smoothie; baked beans; potato salad; stuffed peppers; a berry crumble;
    chicken noodle soup; guacamole; waffles; sushi rolls; carrot cake; a breakfast burrito; lemonade; hot chocolate
""")
HOBBIES = _split("""
    running; cycling; swimming; hiking; rock climbing; drawing; watercolour painting; playing the guitar; singing;
    playing chess; bird watching; gardening; baking; knitting; sewing; woodworking; pottery; photography; writing a
    diary; reading novels; learning Spanish; learning to code; juggling; calligraphy; origami; sailing; dancing;
    fishing; stargazing; collecting stamps; model building; meditation; yoga; tennis; volunteering; camping; origami
    animals; blogging; playing the piano; video editing; home brewing; beekeeping; public speaking; speed cubing
""")
NAMES = _split("""
    Maria; Ahmed; Lucas; Priya; Hannah; Diego; Mei; Oliver; Fatima; Jonas; Sara; Kofi; Elena; Noah; Yuki; Ingrid;
    Peter; Leila; Marco; Grace; Ivan; Amina; Paul; Nora; Samuel; Clara; Victor; Zoe; Daniel; Rosa; Henry; Tara; Felix
""")
SITUATIONS = _split("""
    moving to a new city; the first day at a new job; an exam next week; a long flight; a power cut; a rainy weekend;
    a birthday party for a child; a job interview by video; a noisy neighbour; a broken washing machine; a lost wallet;
    a delayed train; a visit from relatives; a tight budget; a new puppy; a camping trip; a school project; a wedding
    speech; a small apartment; a bad cold; a disagreement with a colleague; a missed deadline; a garden full of weeds;
    a computer that is slow; a friend who feels lonely; a sore back; a picky eater; a road trip; a marathon in spring;
    a team meeting; a presentation in class; a yard sale; a house full of boxes; a winter storm; a holiday abroad
""")
EMOTIONS = _split("""
    happy; nervous; proud; lonely; curious; tired; bored; hopeful; angry; grateful; confused; excited; jealous;
    calm; worried; disappointed; inspired; embarrassed; cheerful; restless; shy; overwhelmed; relieved; sad
""")
TASKS = _split("""
    reverses a string; counts the vowels in a text; checks whether a number is prime; returns the largest of three
    numbers; sums the digits of a number; removes duplicates from a list; merges two sorted lists; checks whether a word
    is a palindrome; computes the factorial of a number; returns the first n Fibonacci numbers; finds the second largest
    number in a list; counts how often each word occurs; converts Celsius to Fahrenheit; sorts a list of tuples by the
    second item; flattens a nested list; finds the longest word in a sentence; computes the average of a list; checks
    whether a year is a leap year; swaps the keys and values of a dictionary; returns the common items of two lists;
    capitalises every word; computes the greatest common divisor; finds all divisors of a number; rotates a list by n
    places; splits a list into chunks; checks whether two words are anagrams; counts the lines of a file; reads numbers
    from a file and adds them; converts a number to binary; draws a triangle of stars; removes all spaces from a text;
    finds the missing number in a range; multiplies two matrices; computes compound interest; validates an e-mail
    address; generates a random password; counts the days between two dates; filters the even numbers of a list; finds
    the index of an item; computes the median of a list; prints a multiplication table; converts minutes to hours and
    minutes; checks whether a list is sorted; finds the most frequent item; replaces negative numbers by zero; computes
    the area of a circle; translates a text to Morse code; encrypts a text with a shift cipher; returns the nth power of
    a number; counts capital letters; joins words with commas; zips two lists into a dictionary; transposes a matrix;
    finds all pairs that add up to a target; does a binary search; implements bubble sort; implements a stack; groups
    words by their first letter; parses a date; rounds a price to two digits; picks a random item; trims long texts
""")
FORMATS = _split("""
    in three sentences; in one paragraph; in simple words; with an example; for a ten-year-old; step by step;
    as a short list; in about fifty words; for a complete beginner; with two advantages and two disadvantages;
    in a friendly tone; in a formal tone; like a news reader; with a comparison from daily life; briefly; in detail
""")
GENRES = _split("""
    adventure story; fairy tale; mystery; science fiction story; ghost story; fable; comedy; love story; bedtime story;
    diary entry; letter from the past; western; legend; story with a twist at the end
""")
ADJECTIVES = _split("""
    small; ancient; crowded; quiet; windy; golden; forgotten; bright; foggy; narrow; cold; busy; peaceful; strange;
    colourful; dusty; green; rainy; snowy; sunny
""")
PRODUCTS = _split("""
    apples; pencils; books; tickets; eggs; marbles; cookies; stickers; chairs; bottles; stamps; flowers; shirts; coins;
    oranges; bricks; balloons; photos; cups; candles; buttons; cards
""")
